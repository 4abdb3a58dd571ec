"""What operations are called, whose store their generations meet in, and what GET /topology says of both."""

from __future__ import annotations

from baton_protocol.topology import OperationPhase
from support.elastic.group_questions import operation
from support.elastic.simulated_group import CONFIG, SimulatedGroup
from support.elastic.simulated_rank import SimulatedRank


def store_of(rank: SimulatedRank) -> str:
    return f"{rank.member.host}:{rank.member.store_port}"


def outcomes(group: SimulatedGroup, kind: str) -> list[OperationPhase]:
    return [each.outcome for each in group.ended if each.kind == kind]


class TestStores:
    def test_the_topology_says_which_store_its_generation_met_in(
        self, group: SimulatedGroup
    ) -> None:
        group.add("a")
        assert group.status().store == ""
        ranks = group.form("b", "c")
        assert group.status().store == store_of(ranks["b"])
        ranks["d"] = group.add("d")
        group.ask("others", "c", "d")
        group.until(lambda: group.serving_together("c", "d"))
        assert group.status().store == store_of(ranks["c"])

    def test_after_a_dead_store_the_next_members_is_taken(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["c"] = group.add("c")
        ranks["a"].store_is_dead = True
        group.ask("more", "a", "b", "c")
        group.until(lambda: group.serving_together("a", "b", "c"))
        assert group.status().store == store_of(ranks["b"])
        assert outcomes(group, "scale") == [OperationPhase.FAILED, OperationPhase.DONE]

    def test_a_store_that_was_dead_is_not_tried_first_again(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["a"].store_is_dead = True
        for names in (("a", "b", "c"), ("a", "b"), ("a", "b", "c")):
            group.add("c")
            group.ask("-".join(names) + str(group.steps), *names)
            group.until(lambda names=names: group.serving_together(*names))
        assert outcomes(group, "scale").count(OperationPhase.FAILED) == 1

    def test_all_are_tried_until_one_answers(self, group: SimulatedGroup) -> None:
        ranks = {name: group.add(name) for name in ("a", "b", "c")}
        ranks["a"].store_is_dead = ranks["b"].store_is_dead = True
        group.ask("first", *ranks)
        group.until(lambda: group.serving_together(*ranks))
        assert group.status().store == store_of(ranks["c"])
        for each, dead in (("a", False), ("b", True), ("c", True)):
            ranks[each].store_is_dead = dead
        group.add("d")
        group.ask("less", "a", "b")
        group.until(lambda: group.serving_together("a", "b"))
        assert group.status().store == store_of(ranks["a"])

    def test_a_recovery_finds_a_store_that_answers(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["a"].store_is_dead = True
        ranks["b"].alive = False
        group.until(
            lambda: group.serving_together("a", "c"),
            seconds=CONFIG.prepare_timeout_s + CONFIG.retry_max_s,
        )
        assert group.status().store == store_of(ranks["c"])


class TestIds:
    def test_a_recovery_does_not_carry_the_id_of_what_was_asked_for_before(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        assert (operation(group).kind, operation(group).operation_id) == ("form", "first")
        ranks["b"].alive = False
        group.until(lambda: operation(group).kind == "recover")
        assert operation(group).operation_id == ""
        group.until(lambda: group.serving_together("a", "c"))
        assert all(
            each.generation is not None and not each.generation.operation_id
            for each in group.alive().values()
        )
        assert (operation(group).kind, operation(group).operation_id) == ("scale", "first"), (
            "the lost one is waited for"
        )

    def test_a_recovery_is_not_followed_by_an_acknowledgement_of_what_was_fulfilled_before(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b")
        ranks["b"].alive = False
        ranks["b2"] = group.add("b")  # its successor is there before it is missed
        group.until(lambda: operation(group).kind == "recover")
        group.until(lambda: group.serving_together("a", "b"))
        group.run(CONFIG.wait_s)
        assert (operation(group).kind, operation(group).operation_id) == ("recover", "")

    def test_what_is_waited_for_after_a_recovery_was_asked_for(self, group: SimulatedGroup) -> None:
        """The lost member's place is still wanted: to fill it is the request's again."""
        ranks = group.form("a", "b")
        ranks["b"].alive = False
        group.until(lambda: group.serving_together("a"))
        group.add("b")
        group.until(lambda: group.serving_together("a", "b"))
        assert (operation(group).kind, operation(group).operation_id) == ("scale", "first")

    def test_a_request_that_a_recovery_overtook_is_acknowledged_once(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        ranks["c"].alive = False
        group.until(lambda: operation(group).kind == "recover")
        group.ask("less", "a", "b")
        group.until(
            lambda: group.serving_together("a", "b") and operation(group).operation_id == "less"
        )
        assert (operation(group).kind, operation(group).phase) == ("scale", OperationPhase.DONE)
        ranks["b"].alive = False
        group.until(lambda: operation(group).kind == "recover")
        assert operation(group).operation_id == ""

    def test_to_place_experts_anew_has_no_id(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.controller.on_rebalance()
        group.until(
            lambda: (
                operation(group).kind == "rebalance"
                and operation(group).phase is OperationPhase.DONE
            )
        )
        assert operation(group).operation_id == ""

    def test_a_restarted_controller_acknowledges_what_is_asked_again(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        ranks["c"].alive = False
        group.until(lambda: group.serving_together("a", "b"))
        group.start_controller()
        group.run(CONFIG.dead_after_s + CONFIG.settle_s)
        group.ask("again", "a", "b")
        group.until(lambda: group.status().operation is not None, seconds=2.0)
        assert operation(group).operation_id == "again"
        assert operation(group).phase is OperationPhase.DONE
