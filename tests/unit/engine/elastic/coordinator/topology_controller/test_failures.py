"""How the controller handles ranks that die or freeze, also during a commit."""

from __future__ import annotations

import pytest

from baton_protocol.topology import OperationPhase, RankPhase
from support.elastic.simulated_group import CONFIG, SimulatedGroup, names_of
from support.elastic.simulated_rank import NUM_EXPERTS, SimulatedRank


class TestRecovery:
    @pytest.mark.parametrize("how", ["alive", "frozen"])
    def test_survivors_continue_in_their_order(self, group: SimulatedGroup, how: str) -> None:
        ranks = group.form("a", "b", "c")
        setattr(ranks["b"], how, how == "frozen")
        took = group.until(
            lambda: group.serving_together("a", "c") or _only_frozen_is_left(group, ranks)
        )
        assert took < 2.5
        generation = ranks["a"].generation
        assert generation.urgent
        assert names_of(generation) == ["a", "c"]
        assert all(
            {e for slots in layer for e in slots} == set(range(NUM_EXPERTS))
            for layer in generation.placement
        )

    def test_a_suspected_rank_is_dead_sooner(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["b"].frozen = True
        group.run(0.3)
        ranks["a"].phase, ranks["a"].suspects = RankPhase.BROKEN, (ranks["b"].id,)
        took = group.until(lambda: ranks["a"].generation.size == 1)
        assert took < CONFIG.dead_after_s - 0.3

    def test_a_suspected_rank_that_reports_is_kept(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["a"].phase, ranks["a"].suspects = RankPhase.BROKEN, (ranks["b"].id,)
        group.until(lambda: len(ranks["a"].committed) == 2)
        assert names_of(ranks["a"].generation) == ["a", "b"]
        assert ranks["a"].generation.urgent

    def test_a_recovery_includes_a_new_rank_that_is_ready(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["c"] = group.add("c", phase=RankPhase.LOADING)
        group.ask("more", "a", "b", "c")
        group.run(1.0)
        ranks["c"].phase = RankPhase.STANDBY
        ranks["a"].alive = False
        group.run(0.1)
        group.until(
            lambda: (
                ranks["c"].generation is not None
                and ranks["a"].id not in str(ranks["c"].generation)
            )
        )
        assert names_of(ranks["b"].generation) == ["b", "c"]

    def test_a_new_process_of_a_name_replaces_the_earlier_one(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        successor = group.add("b")  # the earlier one still responds
        group.until(lambda: successor.generation is not None)
        group.until(lambda: ranks["b"].generation is None)
        assert [each.instance_id for each in successor.generation.members] == [
            ranks["a"].id,
            successor.id,
        ]
        (old,) = [
            member for member in group.status().members if member.instance_id == ranks["b"].id
        ]
        assert old.reason == "another process of this name has registered"

    def test_a_rank_frozen_during_a_recovery_is_dismissed_and_rejoins_as_new(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        ranks["a"].frozen = True
        group.until(lambda: ranks["b"].generation.size == 2)
        assert ranks["a"].generation.size == 3
        ranks["a"].frozen = False
        group.until(lambda: ranks["a"].generation is None, seconds=1.0)
        group.until(lambda: group.serving_together("a", "b", "c"))
        assert names_of(ranks["a"].generation) == ["b", "c", "a"], (
            "it did not rejoin as the last rank"
        )

    def test_a_group_without_living_ranks_forms_again(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        for rank in ranks.values():
            rank.alive = False
        group.run(3.0)
        assert group.status().generation == 0
        group.add("a")
        group.add("b")
        group.until(lambda: group.serving_together("a", "b"))
        assert group.status().generation > 1, "the generation numbers restarted"

    def test_a_recovery_does_not_wait_for_new_ranks_that_fail(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.add("c", cannot_prepare=True)
        group.ask("more", "a", "b", "c")
        group.until(lambda: group.operation.phase is OperationPhase.FAILED)
        ranks["b"].alive = False
        took = group.until(lambda: ranks["a"].generation.size == 1)
        assert took < 1.0

    def test_a_survivor_that_cannot_prepare_is_excluded(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["b"].cannot_prepare = True
        ranks["c"].alive = False
        group.until(lambda: ranks["a"].generation.size == 1)
        group.until(lambda: ranks["b"].phase is RankPhase.STANDBY)

    def test_a_member_that_left_its_generation_causes_a_recovery(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b")
        ranks["b"].leave()
        group.until(lambda: group.serving_together("a", "b"))
        assert ranks["a"].generation.urgent

    def test_ranks_are_not_dead_after_a_pause_of_the_coordinator(
        self, group: SimulatedGroup
    ) -> None:
        group.form("a", "b")
        group.now += 60.0
        group.run(2.0)
        assert group.status().generation == 1


def _only_frozen_is_left(group: SimulatedGroup, ranks: dict[str, SimulatedRank]) -> bool:
    return ranks["b"].frozen and all(ranks[name].generation.size == 2 for name in ("a", "c"))


class TestDuringACommit:
    def committed(self, group: SimulatedGroup, *blocked: str) -> dict[str, SimulatedRank]:
        """Commit a change from (a, b) to (b, c), which the `blocked` ranks do not complete."""
        ranks = group.form("a", "b")
        ranks["c"] = group.add("c")
        for name in blocked:
            ranks[name].never_commits = True
        group.ask("swap", "b", "c")
        group.until(lambda: group.operation.phase is OperationPhase.COMMITTING)
        return ranks

    @pytest.mark.parametrize("victim", ["a", "b", "c"])
    def test_a_death_starts_an_urgent_generation_with_a_higher_number(
        self, group: SimulatedGroup, victim: str
    ) -> None:
        ranks = self.committed(group, "b")
        committed = group.directive_of(ranks["b"]).target
        ranks[victim].alive = False
        ranks["b"].never_commits = False
        survivors = [name for name in ("b", "c") if name != victim]
        group.until(lambda: group.serving_together(*survivors))
        last = ranks[survivors[0]].generation
        # Without the vote of the leaving rank the commit cannot be completed.
        assert last.number > committed.number or victim == "a"

    def test_a_stalled_commit_starts_an_urgent_generation(self, group: SimulatedGroup) -> None:
        ranks = self.committed(group, "b")
        committed = group.directive_of(ranks["b"]).target
        took = group.until(lambda: group.operation.kind == "recover")
        assert took > CONFIG.commit_timeout_s
        ranks["b"].never_commits = False
        group.until(lambda: group.serving_together("b", "c"))
        assert ranks["b"].generation.number == committed.number + 1

    def test_a_commit_that_no_rank_completed_is_not_taken_back(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["b"].never_commits = True
        group.ask("less", "b")
        group.until(lambda: group.operation.kind == "recover")
        target = group.directive_of(ranks["b"]).target
        assert (target.number, target.urgent) == (3, True)
        ranks["b"].never_commits = False
        group.until(lambda: group.serving_together("b"))

    def test_a_rank_that_never_completes_a_commit_is_excluded(self, group: SimulatedGroup) -> None:
        ranks = self.committed(group, "b")
        group.until(
            lambda: ranks["c"].generation is not None and ranks["c"].generation.size == 1,
            seconds=30.0,
        )
        assert ranks["b"].phase is RankPhase.STANDBY

    def test_ranks_of_two_generations_are_joined_in_a_higher_one(
        self, group: SimulatedGroup
    ) -> None:
        ranks = self.committed(group, "b")
        group.until(lambda: ranks["c"].generation is not None)  # new ranks do not wait for the vote
        ranks["a"].phase = RankPhase.BROKEN
        ranks["b"].never_commits = False
        group.until(lambda: group.serving_together("b", "c"))
        assert ranks["b"].generation.number > ranks["c"].committed[0].number
