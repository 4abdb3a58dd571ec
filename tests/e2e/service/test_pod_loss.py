"""Pods of a running service are deleted or evicted under load: no request fails.

Every token must be right. These take minutes, so they run with `make chaos` only.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton_engine.random_checkpoint import create_checkpoint
from baton_operator.names import ordinal_of
from support.elastic.expert_group import SHAPE
from support.elastic.expert_group import VOCAB_SIZE as EXPERT_VOCAB_SIZE
from support.load import fresh_connections, under_load
from support.parity import reference_model
from support.service import expert_service
from support.service.local_cluster import LocalClusterUnderTest, local_cluster, manifest
from support.service.pod_loss import delete_pod, lose_pod, uids
from support.waiting import eventually

NAME = "pod-loss"
ROLES = ("prefill", "decode", "gateway")
VOCAB_SIZE = 512
WIDTH = 3
FORCE = ("--force", "--grace-period=0")
NODE = "baton-local"
#: Time for the controller manager to observe which pods are ready.
BUDGET_S = 60.0


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("control_plane", ["embedded", "real"])
async def test_a_deleted_pod_of_each_role_fails_no_request(
    control_plane: str, tmp_path: Path
) -> None:
    checkpoint = create_checkpoint(tmp_path / "model", "qwen3", seed=5, vocab_size=VOCAB_SIZE)
    model = reference_model(checkpoint)
    with local_cluster(control_plane) as cluster:
        await asyncio.to_thread(cluster.up, service_of(checkpoint))
        endpoint = cluster.get("llms", NAME)["status"]["endpoint"]
        async with (
            under_load(endpoint, model, width=WIDTH, vocab_size=VOCAB_SIZE),
            fresh_connections(endpoint),
        ):
            for role in ROLES:
                await asyncio.to_thread(lose, cluster, role)
            for role in ("prefill", "decode"):
                await asyncio.to_thread(lose, cluster, role, *FORCE)
        # Killing a gateway breaks only its own connections.
        async with (
            under_load(
                endpoint,
                model,
                width=WIDTH,
                vocab_size=VOCAB_SIZE,
                excused=lambda stream: "Client" in stream.error,
            ) as load,
            fresh_connections(endpoint),
        ):
            await asyncio.to_thread(lose, cluster, "gateway", *FORCE)
        print(f"{len(load.failed)} of {len(load.streams)} streams were cut off with their gateway")
        assert len(load.failed) <= WIDTH, "more streams failed than were open"
        again = await load.replay([stream.number for stream in load.failed])
        assert not [stream.error for stream in again.values() if stream.error]


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("control_plane", ["embedded", "real"])
async def test_a_deleted_rank_of_an_expert_group_fails_no_request(
    control_plane: str, tmp_path: Path
) -> None:
    checkpoint = create_checkpoint(tmp_path / "moe", "qwen3_moe", **SHAPE)
    with local_cluster(control_plane) as cluster:
        await asyncio.to_thread(cluster.up, expert_service.service_of(checkpoint))
        service = expert_service.ExpertService(cluster)
        await asyncio.to_thread(service.wait_at_rest, 0, 1)
        endpoint = cluster.get("llms", expert_service.NAME)["status"]["endpoint"]
        async with under_load(
            endpoint, reference_model(checkpoint), width=WIDTH, vocab_size=EXPERT_VOCAB_SIZE
        ):
            await asyncio.to_thread(lose_rank, cluster, service)
            await asyncio.to_thread(lose_rank, cluster, service, *FORCE)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_evictions_fail_no_request_and_stay_within_the_budgets(tmp_path: Path) -> None:
    """Only on the real control plane: the embedded one has no evictions."""
    checkpoint = create_checkpoint(tmp_path / "model", "qwen3", seed=5, vocab_size=VOCAB_SIZE)
    with local_cluster("real") as cluster:
        await asyncio.to_thread(cluster.up, service_of(checkpoint))
        endpoint = cluster.get("llms", NAME)["status"]["endpoint"]
        async with (
            under_load(endpoint, reference_model(checkpoint), width=WIDTH, vocab_size=VOCAB_SIZE),
            fresh_connections(endpoint),
        ):
            for role in ("decode", "gateway"):
                await asyncio.to_thread(evict_one_of_two, cluster, role)
            await asyncio.to_thread(drain_the_node, cluster)


def service_of(checkpoint: Path) -> dict[str, Any]:
    """Return a service whose served name is the one that `Load` requests."""
    service = manifest(NAME, checkpoint, prefill=1, decode=2, gateway={"replicas": 2})
    service["spec"]["model"]["servedName"] = "m"
    return service


def lose(cluster: LocalClusterUnderTest, role: str, *flags: str) -> None:
    others = {each: uids(cluster, NAME, each) for each in ROLES if each != role}
    print(
        " ".join(
            [cluster.control_plane, role, *flags, str(delete_pod(cluster, NAME, role, *flags))]
        )
    )
    cluster.wait_ready(NAME)
    assert {each: uids(cluster, NAME, each) for each in others} == others, (
        "pods of other roles were also replaced"
    )


def lose_rank(
    cluster: LocalClusterUnderTest, service: expert_service.ExpertService, *flags: str
) -> None:
    print(
        " ".join(
            [
                cluster.control_plane,
                "rank",
                *flags,
                str(delete_pod(cluster, expert_service.NAME, "decode", *flags)),
            ]
        )
    )
    pods = cluster.pods(expert_service.NAME, "decode")
    service.wait_at_rest(*(ordinal_of(pod["metadata"]["name"]) for pod in pods))


def evict_one_of_two(cluster: LocalClusterUnderTest, role: str) -> None:
    """Evict one pod. The eviction of the other one must be refused."""
    wait_for_budget(cluster, role)
    names = [pod["metadata"]["name"] for pod in cluster.pods(NAME, role)]

    def take(pod: str) -> None:
        assert "Success" in (said := evict(cluster, pod)), said
        (other,) = set(names) - {pod}
        refused = evict(cluster, other)
        assert "TooManyRequests" in refused, refused
        assert "disruption budget" in refused, refused

    print(f"{cluster.control_plane} {role} evicted {lose_pod(cluster, NAME, role, take)}")
    cluster.wait_ready(NAME)


def drain_the_node(cluster: LocalClusterUnderTest) -> None:
    """Drain the only node. Evicted pods find no node, so the budget keeps one pod of two."""
    for role in ("decode", "gateway"):
        wait_for_budget(cluster, role)
    before = {role: uids(cluster, NAME, role) for role in ROLES}
    said = cluster.kubectl("drain", NODE, "--delete-emptydir-data", "--timeout=30s", check=False)
    assert "Cannot evict pod as it would violate the pod's disruption budget" in said, said
    left = {role: len(uids(cluster, NAME, role) & before[role]) for role in ROLES}
    assert left == {"prefill": 0, "decode": 1, "gateway": 1}, said
    cluster.kubectl("uncordon", NODE)
    cluster.wait_ready(NAME)


def wait_for_budget(cluster: LocalClusterUnderTest, role: str) -> None:
    def allowed() -> bool:
        status = cluster.get("poddisruptionbudgets", f"{NAME}-{role}")["status"]
        assert status.get("disruptionsAllowed") == 1, status
        return True

    eventually(
        allowed, timeout_s=BUDGET_S, what=f"a budget that spares one {role} pod", every_s=0.5
    )


def evict(cluster: LocalClusterUnderTest, pod: str) -> str:
    """Evict the pod. Return kubectl's output."""
    served = cluster.kubectl("api-versions").split()
    body = {
        "apiVersion": "policy/v1beta1" if "policy/v1beta1" in served else "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": "default"},
    }
    path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
    return cluster.kubectl("create", "--raw", path, "-f", "-", check=False, stdin=json.dumps(body))
