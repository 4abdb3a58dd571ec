"""A resolved service has the values that builders read from one LLMService."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.builders.resolved_service import ResolvedService, controlled_by
from support.operator.services import resolved

RANKS: dict[str, Any] = {"decode": {"parallelism": {"expert": True, "tensor": 2}}}


def sized(size: int) -> ResolvedService:
    """Return a service whose decode group the autoscaler has sized."""
    autoscaling = {"minReplicas": 0, "maxReplicas": 4, "itlMilliseconds": 50}
    service = resolved(decode={"replicas": 1, "autoscaling": autoscaling})
    return msgspec.structs.replace(service, sizes={"decode": size})


def test_the_autoscaler_overrides_the_replicas_of_the_spec() -> None:
    service = resolved(prefill={"replicas": 3}, decode={"replicas": 2})
    assert (service.replicas("prefill"), service.replicas("decode")) == (3, 2)
    assert sized(4).replicas("decode") == 4
    assert resolved().replicas("prefill") == 0


def test_a_group_without_autoscaling_is_scaled_to_zero_by_hand() -> None:
    assert resolved(decode={"replicas": 0}).is_scaled_to_zero_by_hand
    assert not resolved(decode={"replicas": 1}).is_scaled_to_zero_by_hand
    assert not sized(0).is_scaled_to_zero_by_hand


def test_the_engine_options_of_a_role_override_those_of_the_service() -> None:
    service = resolved(
        engine={"maxNumSeqs": 8, "device": "cpu"}, prefill={"engine": {"maxNumSeqs": 4}}, decode={}
    )
    assert [service.engine(role).max_num_seqs for role in ("prefill", "decode")] == [4, 8]
    assert service.engine("prefill").device == "cpu"


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        (resolved(coordinator="10.0.0.1", image="other:1", **RANKS), True),
        (resolved(coordinator="10.0.0.1", engine={"maxNumSeqs": 4}, **RANKS), True),
        (resolved(coordinator="10.0.0.2", **RANKS), False),
        (resolved(coordinator="10.0.0.1", key_name="other", **RANKS), False),
        (resolved(coordinator="10.0.0.1", model={"uri": "file:///models/y"}, **RANKS), False),
        (resolved(coordinator="10.0.0.1", decode={"parallelism": {"expert": True}}), False),
    ],
)
def test_ranks_with_equal_parts_of_a_topology_share_an_expert_group(
    changed: ResolvedService, is_same: bool
) -> None:
    ranks = resolved(coordinator="10.0.0.1", **RANKS)
    assert (changed.expert_group("decode") == ranks.expert_group("decode")) == is_same


def test_independent_engines_have_no_expert_group() -> None:
    assert resolved().expert_group("decode") == ""
    assert resolved(coordinator="10.0.0.1", prefill={}, **RANKS).expert_group("prefill") == ""


def test_only_the_controlling_owner_controls_an_object() -> None:
    service = resolved()
    owned = {"metadata": service.metadata("demo-gateway", "gateway")}
    assert controlled_by(owned, service.uid)
    assert not controlled_by(owned, "another uid")
    references = [{**service.reference, "controller": False}]
    assert not controlled_by({"metadata": {"ownerReferences": references}}, service.uid)
    assert not controlled_by({"metadata": {}}, service.uid)
