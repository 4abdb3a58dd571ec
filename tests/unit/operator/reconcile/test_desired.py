"""The desired objects of an expert-parallel group and its coordinator."""

from __future__ import annotations

from typing import Any

from baton_operator.reconcile.desired import compute_desired
from support.operator.services import resolved

RANKS: dict[str, Any] = {
    "decode": {"replicas": 2, "parallelism": {"expert": True, "tensor": 2, "redundantExperts": 3}}
}


def test_ranks_are_created_when_the_coordinator_has_an_address() -> None:
    before, after = (
        compute_desired(resolved(prefill={}, **RANKS), None),
        compute_desired(resolved(prefill={}, coordinator="10.0.0.1", **RANKS), None),
    )
    assert set(before.members) == {"prefill"}
    assert set(after.members) == {"prefill", "decode"}
    for each in (before, after):
        made = {(obj["kind"], obj["metadata"]["name"]) for obj in each.objects}
        assert {("Deployment", "demo-coordinator"), ("Service", "demo-coordinator")} <= made
    configured = [obj["metadata"]["name"] for obj in before.objects if obj["kind"] == "ConfigMap"]
    assert not any("decode" in name for name in configured)


def test_the_coordinator_is_kept_while_ranks_need_it() -> None:
    objects = [("Deployment", "demo-coordinator"), ("Service", "demo-coordinator")]
    assert set(objects) <= set(compute_desired(resolved(), None).absent)
    assert not set(objects) & set(compute_desired(resolved(), None, keep_coordinator=True).absent)
