"""The members of the first generation of a group."""

from __future__ import annotations

from baton_protocol.topology import OperationPhase, RankPhase
from support.elastic.simulated_group import CONFIG, SimulatedGroup, names_of
from support.elastic.simulated_rank import NUM_EXPERTS


class TestForming:
    def test_waits_for_all_requested_members(self, group: SimulatedGroup) -> None:
        group.add("a")
        group.ask("o", "a", "b")
        group.run(CONFIG.settle_s + 1.0)
        assert group.operation.phase is OperationPhase.WAITING
        assert "b" in group.operation.reason
        b = group.add("b", phase=RankPhase.LOADING)
        group.run(0.5)
        assert group.operation.phase is OperationPhase.WAITING
        b.phase = RankPhase.STANDBY
        group.until(lambda: group.serving_together("a", "b"), seconds=1.0)
        assert group.operation.kind == "form"

    def test_forms_with_the_registered_members_after_form_after_s(
        self, group: SimulatedGroup
    ) -> None:
        group.ask("o", "a", "b", "c")
        group.run(2 * CONFIG.form_after_s)  # without registered ranks the time has not begun
        group.add("a")
        group.run(CONFIG.form_after_s - 0.5)
        assert group.status().generation == 0
        group.add("b")
        group.until(lambda: group.serving_together("a", "b"), seconds=3.0)

    def test_without_a_request_nothing_happens(self, group: SimulatedGroup) -> None:
        group.add("a")
        group.run(5.0)
        assert group.status().generation == 0
        assert group.status().operation is None

    def test_members_are_ordered_by_name_and_use_the_store_of_the_first(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("b", "a")
        generation = ranks["a"].generation
        assert names_of(generation) == ["a", "b"]
        assert (generation.store_host, generation.store_port) == (
            ranks["a"].member.host,
            ranks["a"].member.store_port,
        )
        assert all(
            {e for slots in layer for e in slots} == set(range(NUM_EXPERTS))
            for layer in generation.placement
        )

    def test_ranks_of_another_model_are_excluded_with_a_reason(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.add("c", num_experts=NUM_EXPERTS + 1)
        group.ask("more", "a", "b", "c")
        group.run(CONFIG.wait_s + 1)
        assert group.serving_together("a", "b")
        (other,) = [member for member in group.status().members if member.name == "c"]
        assert "5 experts, the group has 2 of 4" in other.reason
