"""PodDisruptionBudgets of the roles."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.builders import disruption_budget
from baton_operator.builders.absent import Absent
from baton_operator.names import GROUP, ConfiguredRole
from baton_operator.reconcile.desired import compute_desired
from support.operator.services import resolved


def test_disruption_budgets_need_several_pods_and_a_server_with_the_api() -> None:
    single = disruption_budget.build(resolved(), "decode", "policy/v1")
    assert single == Absent("PodDisruptionBudget", "demo-decode")
    budget = disruption_budget.build(resolved(decode={"replicas": 3}), "decode", "policy/v1beta1")
    assert (budget["apiVersion"], budget["spec"]["minAvailable"]) == ("policy/v1beta1", 2)
    kinds = {obj["kind"] for obj in compute_desired(resolved(decode={"replicas": 3}), None).objects}
    assert "PodDisruptionBudget" not in kinds


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
def test_a_budget_allows_one_disruption_and_single_pods_have_none(
    role: ConfiguredRole,
) -> None:
    def budgets(replicas: int) -> tuple[list[Any], list[tuple[str, str]]]:
        wanted = compute_desired(
            resolved(**({"prefill": {}} | {role: {"replicas": replicas}})), "policy/v1"
        )
        found = [obj for obj in wanted.objects if obj["metadata"]["name"] == f"demo-{role}"]
        return [obj["spec"] for obj in found if obj["kind"] == "PodDisruptionBudget"], wanted.absent

    (several,), absent = budgets(3)
    selector = {f"{GROUP}/service": "demo", f"{GROUP}/role": role}
    assert several == {"minAvailable": 2, "selector": {"matchLabels": selector}}
    assert ("PodDisruptionBudget", f"demo-{role}") not in absent
    single, absent = budgets(1)
    assert single == []
    assert ("PodDisruptionBudget", f"demo-{role}") in absent
