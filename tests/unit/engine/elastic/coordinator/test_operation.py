"""Ids of operations: requests that repeat, wait, end and are acknowledged."""

from __future__ import annotations

from baton_protocol.topology import OperationPhase
from support.elastic.simulated_group import CONFIG, SimulatedGroup


class TestIds:
    def test_a_recovery_does_not_have_the_id_of_the_earlier_request(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        assert (group.operation.kind, group.operation.operation_id) == ("form", "first")
        ranks["b"].alive = False
        group.until(lambda: group.operation.kind == "recover")
        assert group.operation.operation_id == ""
        group.until(lambda: group.serving_together("a", "c"))
        assert all(
            each.generation is not None and not each.generation.operation_id
            for each in group.alive().values()
        )
        assert (group.operation.kind, group.operation.operation_id) == ("scale", "first"), (
            "the operation does not wait for the lost member"
        )

    def test_a_recovery_is_not_followed_by_an_operation_of_a_fulfilled_request(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b")
        ranks["b"].alive = False
        ranks["b2"] = group.add("b")  # its successor registers before the loss is detected
        group.until(lambda: group.operation.kind == "recover")
        group.until(lambda: group.serving_together("a", "b"))
        group.run(CONFIG.wait_s)
        assert (group.operation.kind, group.operation.operation_id) == ("recover", "")

    def test_after_a_recovery_the_request_waits_for_the_lost_member(
        self, group: SimulatedGroup
    ) -> None:
        """The operation that replaces the lost member has the request's id."""
        ranks = group.form("a", "b")
        ranks["b"].alive = False
        group.until(lambda: group.serving_together("a"))
        group.add("b")
        group.until(lambda: group.serving_together("a", "b"))
        assert (group.operation.kind, group.operation.operation_id) == ("scale", "first")

    def test_a_request_fulfilled_by_a_recovery_is_acknowledged_once(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        ranks["c"].alive = False
        group.until(lambda: group.operation.kind == "recover")
        group.ask("less", "a", "b")
        group.until(
            lambda: group.serving_together("a", "b") and group.operation.operation_id == "less"
        )
        assert (group.operation.kind, group.operation.phase) == ("scale", OperationPhase.DONE)
        ranks["b"].alive = False
        group.until(lambda: group.operation.kind == "recover")
        assert group.operation.operation_id == ""

    def test_a_rebalance_has_no_id(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.controller.on_rebalance()
        group.until(
            lambda: (
                group.operation.kind == "rebalance" and group.operation.phase is OperationPhase.DONE
            )
        )
        assert group.operation.operation_id == ""

    def test_a_restarted_controller_acknowledges_a_repeated_request(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        ranks["c"].alive = False
        group.until(lambda: group.serving_together("a", "b"))
        group.start_controller()
        group.run(CONFIG.dead_after_s + CONFIG.settle_s)
        group.ask("again", "a", "b")
        group.until(lambda: group.status().operation is not None, seconds=2.0)
        assert group.operation.operation_id == "again"
        assert group.operation.phase is OperationPhase.DONE
