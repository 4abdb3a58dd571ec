"""The ranks of an expert-parallel group: their settings, and what changes the group."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.names import GROUP
from baton_protocol.options.config import EngineConfig
from support.operator.services import decoded_config, resolved

RANKS: dict[str, Any] = {
    "decode": {"replicas": 2, "parallelism": {"expert": True, "tensor": 2, "redundantExperts": 3}}
}


@pytest.mark.parametrize(
    ("address", "endpoint"), [("10.96.0.9", "10.96.0.9:5560"), ("fd00::9", "[fd00::9]:5560")]
)
def test_ranks_get_the_address_of_their_coordinator_and_their_name(
    address: str, endpoint: str
) -> None:
    parallel = decoded_config("decode", EngineConfig, coordinator=address, **RANKS).parallel
    assert (
        parallel.enable_expert_parallel,
        parallel.coordinator,
        parallel.num_redundant_experts,
    ) == (True, endpoint, 3)
    assert (parallel.tensor_parallel_size, parallel.rank_name) == (2, "")
    (container,) = MemberTemplate(resolved(coordinator=address, **RANKS), "decode").pod(0)["spec"][
        "containers"
    ]
    (name,) = [item for item in container["env"] if item["name"] == "POD_NAME"]
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert not decoded_config(
        "prefill", EngineConfig, coordinator=address, prefill={}, **RANKS
    ).parallel.enable_expert_parallel
    assert not decoded_config("decode", EngineConfig).parallel.enable_expert_parallel


def test_changes_of_the_expert_group_and_changes_of_only_the_revision() -> None:
    def template(address: str = "10.0.0.1", **spec: Any) -> MemberTemplate:
        return MemberTemplate(resolved(coordinator=address, **{**RANKS, **spec}), "decode")

    ranks = template()
    annotation = ranks.pod(0)["metadata"]["annotations"][f"{GROUP}/expert-group"]
    assert annotation == ranks.expert_group
    for same in (template(image="other:1"), template(engine={"maxNumSeqs": 4})):
        assert same.revision != ranks.revision
        assert same.expert_group == ranks.expert_group
    rebalance = {
        "expert": True,
        "tensor": 2,
        "redundantExperts": 3,
        "rebalance": {"enabled": False},
    }
    assert template(decode={"parallelism": rebalance}).revision == ranks.revision
    for other in (
        template(address="10.0.0.2"),
        template(model={"uri": "file:///models/y"}),
        template(model={"uri": "file:///models/x", "dtype": "float32"}),
        template(engine={"device": "cpu"}),
        template(decode={"parallelism": {"expert": True, "tensor": 1}}),
    ):
        assert other.revision != ranks.revision
        assert other.expert_group != ranks.expert_group
    alone = MemberTemplate(resolved(), "decode")
    assert alone.expert_group == ""
    assert "annotations" not in alone.pod(0)["metadata"]
