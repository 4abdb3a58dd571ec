"""A HorizontalPodAutoscaler sizes the decode group through the scale subresource.

There is no metrics server, so the HPA acts on its minimum only, which needs no metrics.
"""

from __future__ import annotations

import json

import pytest

from support.waiting import eventually

HPA = {
    "apiVersion": "autoscaling/v1",
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": "demo", "namespace": "default"},
    "spec": {
        "scaleTargetRef": {
            "apiVersion": "serving.baton.dev/v1alpha1",
            "kind": "LLMService",
            "name": "demo",
        },
        "minReplicas": 2,
        "maxReplicas": 3,
        "targetCPUUtilizationPercentage": 80,
    },
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", ["real"], indirect=True)
def test_an_hpa_sizes_the_decode_group(cluster, demo) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(HPA))
    try:
        eventually(
            lambda: cluster.get("llms", demo)["spec"]["decode"]["replicas"] == 2,
            timeout_s=60,
            what="2 decode replicas",
        )
        eventually(
            lambda: cluster.wait_ready(demo)["decode"]["ready"] == 2,
            timeout_s=120,
            what="2 decode pods ready",
        )
        hpa = eventually(
            lambda: (
                (found := cluster.get("hpa", "demo"))["status"].get("currentReplicas") == 2
                and found
            ),
            timeout_s=60,
            what="the HPA to count the pods",
        )
        conditions = json.loads(
            hpa["metadata"]["annotations"]["autoscaling.alpha.kubernetes.io/conditions"]
        )
        able = next(condition for condition in conditions if condition["type"] == "AbleToScale")
        assert able["status"] == "True", able
        assert cluster.get("llms", demo)["spec"]["decode"]["replicas"] == 2
    finally:
        cluster.kubectl("delete", "hpa", "demo")
