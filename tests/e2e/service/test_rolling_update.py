"""Rolling updates of each role and of the operator under load.

No request fails and no other role is restarted. A run takes two minutes, so these run with
`make chaos` only.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import psutil
import pytest

from baton_engine.random_checkpoint import create_checkpoint
from support.load import fresh_connections, under_load
from support.parity import reference_model
from support.service.local_cluster import (
    LocalClusterUnderTest,
    local_cluster,
    manifest,
    processes_with_home,
)
from support.service.pod_loss import uids
from support.waiting import eventually

NAME = "rolling"
ROLES = ("prefill", "decode", "gateway")
VOCAB_SIZE = 512
#: Two pods start one after the other on two busy cores. Each imports torch and loads a model.
UPDATED_S = 150.0


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("control_plane", ["embedded", "real"])
async def test_a_rolling_update_of_each_role_and_of_the_operator_fails_no_request(
    control_plane: str, tmp_path: Path
) -> None:
    checkpoint = create_checkpoint(tmp_path / "model", "qwen3", seed=5, vocab_size=VOCAB_SIZE)
    service = manifest(NAME, checkpoint, prefill=1, decode=2, gateway={"replicas": 2})
    service["spec"]["model"]["servedName"] = "m"  # the name that `Load` requests
    with local_cluster(control_plane) as cluster:
        await asyncio.to_thread(cluster.up, service)
        endpoint = cluster.get("llms", NAME)["status"]["endpoint"]
        async with (
            under_load(endpoint, reference_model(checkpoint), width=3, vocab_size=VOCAB_SIZE),
            fresh_connections(endpoint),
        ):
            for role in ROLES:
                await asyncio.to_thread(update_template, cluster, role)
            await asyncio.to_thread(replace_operator, cluster)


def update_template(cluster: LocalClusterUnderTest, role: str) -> None:
    before = {each: uids(cluster, NAME, each) for each in ROLES}
    template = {
        "spec": {role: {"template": {"metadata": {"annotations": {"example.com/release": "2"}}}}}
    }
    cluster.kubectl("patch", f"llms/{NAME}", "--type=merge", "-p", json.dumps(template))

    def replaced() -> bool:
        pods = cluster.pods(NAME, role)
        released = [
            pod["metadata"].get("annotations", {}).get("example.com/release") == "2" for pod in pods
        ]
        assert all(released), (
            f"{released.count(False)} of {len(pods)} {role} pods are of the old revision"
        )
        assert len(pods) == len(before[role]), [pod["metadata"]["name"] for pod in pods]
        return True

    eventually(
        replaced, timeout_s=UPDATED_S, what=f"only {role} pods of the new revision", every_s=0.5
    )
    cluster.wait_ready(NAME)
    assert not uids(cluster, NAME, role) & before[role]
    for other in set(ROLES) - {role}:
        assert uids(cluster, NAME, other) == before[other], f"{other} pods were also replaced"


def replace_operator(cluster: LocalClusterUnderTest) -> None:
    """Restart the operator with SIGTERM, as an update of its Deployment does.

    A decode pod is killed at the same time.
    """
    before = {each: uids(cluster, NAME, each) for each in ROLES}
    old = operator_of(cluster)
    old.send_signal(signal.SIGTERM)
    cluster.process_of(cluster.pods(NAME, "decode")[0]["metadata"]["name"]).send_signal(
        signal.SIGKILL
    )

    def another() -> bool:
        now = operator_of(cluster)
        return now is not None and now.pid != old.pid

    eventually(another, timeout_s=60, what="another operator")
    cluster.wait_ready(NAME)
    assert {each: uids(cluster, NAME, each) for each in ROLES} == before, (
        "an operator's restart replaces no pod"
    )


def operator_of(cluster: LocalClusterUnderTest) -> psutil.Process | None:
    for process in processes_with_home(cluster.home):
        try:
            if any(word.endswith("baton-operator") for word in process.cmdline()):
                return process
        except psutil.Error:
            continue
    return None
