"""How a restarted controller recovers its state from the ranks."""

from __future__ import annotations

import msgspec

from baton_protocol.topology import OperationPhase
from support.elastic.simulated_group import SimulatedGroup
from support.elastic.simulated_rank import SimulatedRank


class TestRestartedCoordinator:
    def test_recovers_the_topology_from_the_ranks_and_changes_nothing(
        self, group: SimulatedGroup
    ) -> None:
        group.form("a", "b")
        group.start_controller()
        group.run(5.0)
        assert group.status().generation == 1
        assert group.status().desired == ["a", "b"]
        assert group.status().operation is None

    def test_continues_the_generation_numbers(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.start_controller()
        group.ask("less", "a")
        group.until(lambda: group.serving_together("a"))
        assert ranks["a"].generation.number == 2
        assert all(number <= 2 for number in (target.number for target in group.targets.values()))

    def test_continues_the_numbers_that_standby_ranks_received(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.ask("less", "a")
        group.until(lambda: group.serving_together("a"))
        ranks["a"].alive = False
        group.start_controller()
        group.ask("other", "b")
        group.until(lambda: group.serving_together("b"))
        assert ranks["b"].generation.number == 3

    def test_a_target_that_ranks_refuse_is_replaced_by_a_higher_one(
        self, group: SimulatedGroup
    ) -> None:
        a = group.form("a")["a"]
        b = group.add("b", never_finishes_preparing=True)
        group.ask("more", "a", "b")
        group.until(lambda: group.operation.phase is OperationPhase.PREPARING)
        # An earlier coordinator had committed this generation.
        a.generation = msgspec.structs.replace(a.generation, number=7, nonce="7.x")
        b.never_finishes_preparing = False
        b.steps_to_prepare = 100
        group.until(lambda: group.operation.generation == 8, seconds=1.0)
        group.until(lambda: group.serving_together("a", "b"))

    def test_sends_no_directive_before_all_had_time_to_report(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.start_controller()
        group.step()
        group.step()
        assert group.controller.directive_for(ranks["a"].id) is None

    def test_the_same_operation_changes_nothing(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.start_controller()
        group.ask("first", "a", "b")
        group.run(3.0)
        assert (group.operation.operation_id, group.operation.phase) == (
            "first",
            OperationPhase.DONE,
        )
        assert len(ranks["a"].committed) == 1

    def test_a_member_that_died_during_the_restart_causes_a_recovery(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b")
        ranks["b"].alive = False
        group.start_controller()
        group.until(lambda: ranks["a"].generation.size == 1, seconds=4.0)

    def test_a_target_that_was_only_prepared_is_dropped(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        ranks["b"] = group.add("b")
        ranks["a"].never_finishes_preparing = True
        group.ask("more", "a", "b")
        group.until(lambda: ranks["b"].prepared)
        group.start_controller()
        group.until(lambda: ranks["b"].target is None)
        group.run(1.0)
        assert group.serving_together("a") or group.status().operation is None
        assert len(ranks["a"].committed) == 1

    def test_a_commit_that_a_rank_completed_is_sent_again(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        ranks["a"].never_commits = True
        ranks["b"] = group.add("b")
        group.ask("more", "a", "b")
        group.until(lambda: ranks["b"].generation is not None)
        group.start_controller()
        group.until(lambda: group.status().operation is not None)
        assert (group.operation.phase, group.operation.operation_id) == (
            OperationPhase.COMMITTING,
            "more",
        )
        ranks["a"].never_commits = False
        group.until(lambda: group.serving_together("a", "b"))
        assert ranks["a"].generation.number == 2

    def commit_received_by_some(self, group: SimulatedGroup) -> dict[str, SimulatedRank]:
        """Commit a change of (a, b, c) to (a, b). Restart the controller before b receives it."""
        ranks = group.form("a", "b", "c")
        group.ask("less", "a", "b")
        group.until(lambda: group.operation.phase is OperationPhase.COMMITTING)
        ranks["b"].frozen = True
        group.until(lambda: ranks["a"].commit_seen == ranks["c"].commit_seen == "2.n2")
        group.start_controller()
        ranks["b"].inbox.clear()  # the unread messages are lost with its connection
        ranks["b"].frozen = False
        return ranks

    def test_a_commit_that_some_received_is_completed(self, group: SimulatedGroup) -> None:
        ranks = self.commit_received_by_some(group)
        group.until(lambda: len(ranks["a"].committed) == 2)
        generation = ranks["a"].generation
        assert (generation.number, generation.urgent) == (2, False)
        group.run(5.0)
        assert group.serving_together("a", "b")
        assert group.status().desired == ["a", "b"]
        assert len(ranks["a"].committed) == 2, "more than one commit"

    def test_a_commit_that_some_received_and_not_all_can_complete_is_replaced_by_a_higher_one(
        self, group: SimulatedGroup
    ) -> None:
        ranks = self.commit_received_by_some(group)
        ranks["b"].target, ranks["b"].prepared = None, False
        group.until(lambda: len(ranks["a"].committed) == 2)
        assert ranks["a"].generation.number == 3
        assert ranks["a"].target is None
        group.until(lambda: group.serving_together("a", "b"))
        group.run(5.0)
        assert len(ranks["a"].committed) == 2, "more than one commit"

    def test_a_commit_that_all_received_is_completed(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        group.ask("less", "a", "b")
        group.until(lambda: group.operation.phase is OperationPhase.COMMITTING)
        group.start_controller()
        group.until(lambda: group.serving_together("a", "b") or len(ranks["a"].committed) == 2)
        group.run(5.0)
        assert ranks["a"].generation.number == 2
        assert group.status().desired == ["a", "b"]
