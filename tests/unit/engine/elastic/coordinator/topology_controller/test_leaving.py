"""How the controller handles the graceful shutdown of one rank or of all ranks."""

from __future__ import annotations

from baton_protocol.topology import OperationPhase, RankPhase
from support.elastic.simulated_group import CONFIG, SimulatedGroup


class TestLeaving:
    def test_a_leaving_member_is_removed_without_waiting_for_a_successor(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b")
        ranks["a"].leaving = True
        took = group.until(lambda: group.serving_together("b"))
        assert took < 2.0
        assert not ranks["b"].generation.urgent
        group.ask("again", "a", "b")
        group.run(CONFIG.wait_s + 1.0)
        assert ranks["a"].generation is None, "a leaving process rejoined"
        ranks["a"].alive = False
        successor = group.add("a")
        group.until(lambda: group.serving_together("a", "b"))
        assert ranks["b"].generation.rank_of(successor.id) == 1

    def test_if_all_leave_they_are_dismissed_after_the_last_request(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b")
        ranks["b"].num_requests = 1
        for rank in ranks.values():
            rank.leaving = True
        group.run(5.0)
        assert all(rank.phase is RankPhase.SERVING for rank in ranks.values()), (
            "b has a request, which needs the experts of a"
        )
        ranks["b"].num_requests = 0
        group.until(
            lambda: all(rank.phase is RankPhase.STANDBY for rank in ranks.values()), seconds=0.5
        )
        group.run(5.0)
        assert all(len(rank.committed) == 1 for rank in ranks.values())
        assert group.status().generation == 0

    def test_if_all_leave_but_a_dead_one_the_others_are_dismissed(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        for name in ("a", "b"):
            ranks[name].leaving = True
        ranks["c"].alive = False
        group.until(
            lambda: all(ranks[name].phase is RankPhase.STANDBY for name in ("a", "b")), seconds=4.0
        )
        assert all(len(rank.committed) == 1 for rank in ranks.values())

    def test_if_all_leave_and_one_dies_the_others_finish_the_requests(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        ranks["a"].num_requests = 1
        for rank in ranks.values():
            rank.leaving = True
        ranks["c"].alive = False
        group.until(lambda: ranks["a"].generation.size == 2)
        ranks["a"].num_requests = 0
        group.until(
            lambda: all(ranks[name].phase is RankPhase.STANDBY for name in ("a", "b")), seconds=2.0
        )

    def test_if_all_leave_they_do_not_wait_for_new_members(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.ask("others", "c", "d")
        for rank in ranks.values():
            rank.leaving = True
        group.until(
            lambda: all(rank.phase is RankPhase.STANDBY for rank in ranks.values()), seconds=0.5
        )
        group.add("c")
        group.add("d")
        group.until(lambda: group.serving_together("c", "d"))

    def test_if_all_leave_a_preparing_successor_takes_over(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.ask("others", "c")
        c = group.add("c", steps_to_prepare=20)
        group.until(lambda: group.operation.phase is OperationPhase.PREPARING)
        for rank in ranks.values():
            rank.leaving = True
        group.until(lambda: group.serving_together("c"))
        assert all(rank.phase is RankPhase.STANDBY for rank in ranks.values())
        assert not c.generation.urgent
