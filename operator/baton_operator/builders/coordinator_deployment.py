"""The Deployment of the coordinator of an expert-parallel group.

The coordinator's pod mounts the service's key, but no configuration and no model.
"""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.field_types import quantity_bytes
from baton_operator.api.spec_groups import Rebalance
from baton_operator.builders import service_key_secret
from baton_operator.builders.engine_settings import Setting
from baton_operator.builders.pod_template import pod
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.topology import COORDINATOR_HTTP_PORT, COORDINATOR_PORT

CONTAINER = "coordinator"
#: Fields of `Rebalance` that set options of `baton-coordinator`.
REBALANCE = (
    Setting("threshold_percent", "rebalance_threshold", lambda percent: f"{1 + percent / 100:g}"),
    Setting("min_interval_seconds", "rebalance_window_s"),
    Setting("max_move_memory", "rebalance_max_move_bytes", quantity_bytes),
)


def build(resolved: ResolvedService) -> Object:
    """Return the coordinator's Deployment, which has one pod.

    A new pod starts only after the old pod has ended, because an expert-parallel group can have
    only one coordinator. Ranks keep serving while no coordinator runs.
    """
    container = {
        "name": CONTAINER,
        "image": resolved.spec.image,
        "command": [
            "baton-coordinator",
            "--service-key-file",
            service_key_secret.FILE,
            *_rebalance_flags(resolved.spec.decode.parallelism.rebalance),
        ],
        "env": pod.identity_env(),
        "ports": [
            {"name": "ranks", "containerPort": COORDINATOR_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": COORDINATOR_HTTP_PORT, "protocol": "TCP"},
        ],
        "startupProbe": pod.http_probe("/health", period_s=1, failures=60),
        "livenessProbe": pod.http_probe("/health", period_s=5, failures=3),
        "readinessProbe": pod.http_probe("/ready", period_s=1, failures=2),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pod.container_security(),
        "volumeMounts": [service_key_secret.mount(), {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": resolved.metadata(names.coordinator_name(resolved.name), "coordinator"),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": names.selector(resolved.name, "coordinator")},
            "template": {
                "metadata": {
                    "labels": names.labels(resolved.name, "coordinator"),
                    "annotations": service_key_secret.pod_annotations(resolved),
                },
                "spec": {
                    "serviceAccountName": names.engine_account_name(resolved.name),
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": pod.pod_security(),
                    "containers": [container],
                    "volumes": [
                        service_key_secret.volume(resolved),
                        {"name": "tmp", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def _rebalance_flags(rebalance: Rebalance) -> list[str]:
    if not rebalance.enabled:
        return ["--rebalance-threshold=0"]
    return [
        f"--{setting.option.replace('_', '-')}={setting.convert(getattr(rebalance, setting.field))}"
        for setting in REBALANCE
    ]
