"""Rendezvous stores that fail are not tried first, and all stores are tried."""

from __future__ import annotations

from baton_protocol.topology import OperationPhase
from support.elastic.simulated_group import CONFIG, SimulatedGroup
from support.elastic.simulated_rank import SimulatedRank


def store_of(rank: SimulatedRank) -> str:
    return f"{rank.member.host}:{rank.member.store_port}"


def outcomes(group: SimulatedGroup, kind: str) -> list[OperationPhase]:
    return [each.outcome for each in group.ended if each.kind == kind]


class TestStores:
    def test_the_topology_names_the_store_of_its_generation(self, group: SimulatedGroup) -> None:
        group.add("a")
        assert group.status().store == ""
        ranks = group.form("b", "c")
        assert group.status().store == store_of(ranks["b"])
        ranks["d"] = group.add("d")
        group.ask("others", "c", "d")
        group.until(lambda: group.serving_together("c", "d"))
        assert group.status().store == store_of(ranks["c"])

    def test_after_a_dead_store_the_next_members_store_is_used(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["c"] = group.add("c")
        ranks["a"].store_is_dead = True
        group.ask("more", "a", "b", "c")
        group.until(lambda: group.serving_together("a", "b", "c"))
        assert group.status().store == store_of(ranks["b"])
        assert outcomes(group, "scale") == [OperationPhase.FAILED, OperationPhase.DONE]

    def test_a_store_that_failed_is_not_tried_first(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["a"].store_is_dead = True
        for names in (("a", "b", "c"), ("a", "b"), ("a", "b", "c")):
            group.add("c")
            group.ask("-".join(names) + str(group.steps), *names)
            group.until(lambda names=names: group.serving_together(*names))
        assert outcomes(group, "scale").count(OperationPhase.FAILED) == 1

    def test_all_stores_are_tried_until_one_responds(self, group: SimulatedGroup) -> None:
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

    def test_a_recovery_finds_a_store_that_responds(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["a"].store_is_dead = True
        ranks["b"].alive = False
        group.until(
            lambda: group.serving_together("a", "c"),
            seconds=CONFIG.prepare_timeout_s + CONFIG.retry_max_s,
        )
        assert group.status().store == store_of(ranks["c"])
