"""Stalled engine loops: which ranks are excluded, and which steps are only slow."""

from __future__ import annotations

from baton_protocol.topology import Activity, RankPhase
from support.elastic.simulated_group import CONFIG, SimulatedGroup


class TestStalls:
    """The process sends statuses, but its loop is stalled."""

    def test_the_only_rank_missing_in_an_exchange_is_excluded(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["b"].stalled_in = Activity.RESTS
        took = group.until(lambda: ranks["a"].generation.size == 2)
        assert CONFIG.stall_after_s < took < CONFIG.stall_after_s + 1.5
        assert ranks["a"].generation.urgent
        group.until(lambda: group.has_recovered, seconds=1.0)
        assert group.directive_of(ranks["b"]).dismissed
        (b,) = [member for member in group.status().members if member.name == "b"]
        assert "its loop is stalled" in b.reason
        ranks["b"].stalled_in = None
        group.until(lambda: group.serving_together("a", "b", "c"))

    def test_a_rank_stalled_in_a_step_is_found_by_an_interruption(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        ranks["b"].stalled_in = ranks["b"].activity = Activity.RUNS
        took = group.until(lambda: ranks["a"].generation.size == 2)
        assert (
            CONFIG.step_stall_after_s
            < took
            < CONFIG.step_stall_after_s + CONFIG.stall_after_s + 1.5
        )
        group.until(lambda: group.has_recovered, seconds=1.0)
        assert [member.name for member in ranks["c"].generation.members] == ["a", "c"]

    def test_two_stalled_ranks_are_both_excluded(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c", "d")
        for name in ("b", "c"):
            ranks[name].stalled_in = Activity.RESTS
        took = group.until(lambda: ranks["a"].generation.size == 2)
        assert took < 2 * CONFIG.stall_after_s + 1.5

    def test_a_rank_that_is_stalled_during_a_recovery_is_excluded(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        ranks["b"].stalled_in = Activity.RESTS
        ranks["c"].alive = False
        took = group.until(lambda: ranks["a"].generation.size == 1)
        assert took < CONFIG.dead_after_s + CONFIG.stall_after_s + 1.5

    def test_a_slow_step_is_repeated_with_more_time_and_excludes_no_rank(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b")
        slow = ranks["b"]

        def run_slowly(seconds: float) -> None:
            """Let both run a step that ends after `seconds` or is interrupted."""
            start = group.now
            slow.stalled_in = slow.activity = Activity.RUNS
            while group.now - start < seconds and group.directive_of(slow).target is None:
                group.step()
            slow.stalled_in = None
            group.until(
                lambda: group.directive_of(slow).target is None and slow.phase is RankPhase.SERVING
            )

        run_slowly(CONFIG.step_stall_after_s + 1.0)
        assert slow.generation.number == 2, "the first slow step was not interrupted"
        assert slow.generation.placement == ranks["a"].committed[0].placement
        run_slowly(CONFIG.step_stall_after_s + 1.0)
        assert slow.generation.number == 2, "the second slow step was interrupted"
        assert group.serving_together("a", "b")

    def test_idle_ranks_and_pauses_of_the_coordinator_are_not_stalls(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b")
        group.run(10 * CONFIG.step_stall_after_s)
        ranks["b"].stalled_in = Activity.RESTS
        group.run(CONFIG.stall_after_s - 0.5)
        group.now += 60.0
        group.step()
        assert group.status().generation == 1
        ranks["b"].stalled_in = None
        group.run(2 * CONFIG.stall_after_s)
        assert ranks["a"].generation.number == 1

    def test_a_group_of_one_rank_is_never_stalled(self, group: SimulatedGroup) -> None:
        a = group.form("a")["a"]
        a.stalled_in = a.activity = Activity.RUNS
        group.run(3 * CONFIG.step_stall_after_s)
        assert group.directive_of(a).target is None
