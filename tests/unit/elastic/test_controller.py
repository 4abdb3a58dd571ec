"""The rules of the controller, one by one: what it does about which ranks say what they are."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from simulated_group import CONFIG, SimulatedGroup
from simulated_rank import NUM_EXPERTS, SimulatedRank

from baton_engine.protocol.topology import (
    Activity,
    Directive,
    ExpertLoads,
    Generation,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyRequest,
)


@pytest.fixture
def group() -> SimulatedGroup:
    return SimulatedGroup()


def told(group: SimulatedGroup, rank: SimulatedRank) -> Directive:
    directive = group.controller.directive_for(rank.id)
    assert directive is not None
    return directive


def operation(group: SimulatedGroup) -> OperationStatus:
    found = group.status().operation
    assert found is not None
    return found


def recovered(group: SimulatedGroup) -> bool:
    return any((each.kind, each.outcome) == ("recover", OperationPhase.DONE) for each in group.ended)


def generation_of(rank: SimulatedRank) -> Generation:
    assert rank.generation is not None
    return rank.generation


def names_of(generation: Generation) -> list[str]:
    return [member.name for member in generation.members]


class TestForming:
    def test_waits_for_all_that_are_asked_for(self, group: SimulatedGroup) -> None:
        group.add("a")
        group.ask("o", "a", "b")
        group.run(CONFIG.settle_s + 1.0)
        assert operation(group).phase is OperationPhase.WAITING
        assert "b" in operation(group).reason
        b = group.add("b", phase=RankPhase.LOADING)
        group.run(0.5)
        assert operation(group).phase is OperationPhase.WAITING
        b.phase = RankPhase.STANDBY
        group.until(lambda: group.serving_together("a", "b"), seconds=1.0)
        assert operation(group).kind == "form"

    def test_goes_with_those_that_are_there_after_a_while(self, group: SimulatedGroup) -> None:
        group.ask("o", "a", "b", "c")
        group.run(2 * CONFIG.form_after_s)  # nobody is there: the time to wait has not begun
        group.add("a")
        group.run(CONFIG.form_after_s - 0.5)
        assert group.status().generation == 0
        group.add("b")
        group.until(lambda: group.serving_together("a", "b"), seconds=3.0)

    def test_nothing_happens_unless_asked(self, group: SimulatedGroup) -> None:
        group.add("a")
        group.run(5.0)
        assert group.status().generation == 0
        assert group.status().operation is None

    def test_members_are_in_order_of_names_and_meet_in_the_store_of_the_first(self, group: SimulatedGroup) -> None:
        ranks = group.form("b", "a")
        generation = generation_of(ranks["a"])
        assert names_of(generation) == ["a", "b"]
        assert (generation.store_host, generation.store_port) == (ranks["a"].member.host, ranks["a"].member.store_port)
        assert all({e for slots in layer for e in slots} == set(range(NUM_EXPERTS)) for layer in generation.placement)

    def test_ranks_of_another_model_are_left_out_and_named(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.add("c", num_experts=NUM_EXPERTS + 1)
        group.ask("more", "a", "b", "c")
        group.run(CONFIG.wait_s + 1)
        assert group.serving_together("a", "b")
        (other,) = [member for member in group.status().members if member.name == "c"]
        assert "5 experts, the group 2 of 4" in other.reason


class TestScaling:
    def test_survivors_keep_their_order_and_newcomers_follow_by_name(self, group: SimulatedGroup) -> None:
        ranks = group.form("b", "d")
        ranks |= {name: group.add(name) for name in ("c", "a")}
        group.ask("more", "a", "b", "c", "d")
        group.until(lambda: group.serving_together("a", "b", "c", "d"))
        generation = generation_of(ranks["b"])
        assert names_of(generation) == ["b", "d", "a", "c"]
        assert not generation.urgent
        assert generation.store_host == ranks["b"].member.host
        assert operation(group).kind == "scale"
        assert set(operation(group).seconds) == {"waiting", "preparing", "committing"}

    def test_any_member_may_leave_and_is_standby_before_the_operation_is_done(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        group.ask("less", "b", "c")
        group.until(lambda: ranks["b"].adopted[-1].number == 2)
        assert names_of(generation_of(ranks["b"])) == ["b", "c"]
        assert ranks["a"].commit_seen == generation_of(ranks["b"]).nonce, "it takes part in the vote"
        group.until(lambda: operation(group).phase is OperationPhase.DONE, seconds=1.0)
        assert ranks["a"].phase is RankPhase.STANDBY
        assert told(group, ranks["a"]).target is None

    def test_waits_for_a_newcomer_only_so_long(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.ask("swap", "a", "c")
        group.run(CONFIG.wait_s - 0.5)
        assert group.serving_together("a", "b")
        assert operation(group).phase is OperationPhase.WAITING
        group.until(lambda: group.serving_together("a"), seconds=2.0)
        group.add("c")  # late, and there at last
        group.until(lambda: group.serving_together("a", "c"), seconds=2.0)

    def test_a_topology_of_nobody_that_exists_is_not_adopted(self, group: SimulatedGroup) -> None:
        group.form("a")
        group.ask("away", "x")
        group.run(3 * CONFIG.wait_s)
        assert group.serving_together("a")

    def test_the_target_is_shown_uncommitted_until_all_have_prepared_it(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        ranks["a"].steps_to_prepare = 12
        ranks["b"] = group.add("b")
        group.ask("more", "a", "b")
        group.until(lambda: ranks["b"].prepared)
        group.run(0.3)
        directives = [told(group, rank) for rank in ranks.values()]
        assert all(each.target is not None and not each.commit for each in directives)
        assert ranks["a"].phase is RankPhase.SERVING
        group.until(lambda: group.serving_together("a", "b"))

    def test_a_newer_request_supersedes_what_is_not_committed(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        ranks["b"] = group.add("b", never_finishes_preparing=True)
        ranks["c"] = group.add("c")
        group.ask("one", "a", "b")
        group.until(lambda: operation(group).phase is OperationPhase.PREPARING)
        group.ask("two", "a", "c")
        group.step()
        target = told(group, ranks["a"]).target
        assert target is not None
        assert (names_of(target), target.number, target.operation_id) == (["a", "c"], 3, "two")
        group.until(lambda: group.serving_together("a", "c"))
        assert ranks["b"].target is None
        assert [(each.kind, each.outcome) for each in group.ended][1:] == [("scale", "superseded"), ("scale", "done")]

    def test_a_newer_request_waits_for_what_is_committed(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        ranks["b"] = group.add("b", never_adopts=True)
        group.ask("one", "a", "b")
        group.until(lambda: operation(group).phase is OperationPhase.COMMITTING)
        group.ask("two", "a")
        group.step()
        assert told(group, ranks["b"]).commit
        ranks["b"].never_adopts = False
        group.until(lambda: group.serving_together("a"))
        assert [generation.operation_id for generation in ranks["a"].adopted] == ["first", "one", "two"]

    def test_a_failed_preparation_leaves_the_old_generation_and_is_tried_again_ever_later(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a")
        b = group.add("b", cannot_prepare=True)
        group.ask("more", "a", "b")
        group.until(lambda: operation(group).phase is OperationPhase.FAILED)
        assert operation(group).reason == "b: the disk is full"
        assert ranks["a"].phase is RankPhase.SERVING
        pauses = []
        for attempt in (2, 3, 4):
            start = group.now
            group.until(lambda: operation(group).phase is OperationPhase.PREPARING)
            pauses.append(group.now - start)
            group.until(lambda: operation(group).phase is OperationPhase.FAILED)
            assert operation(group).generation == attempt + 1
        assert pauses == pytest.approx([0.5, 1.0, 2.0], abs=0.11)
        b.cannot_prepare = False
        group.until(lambda: group.serving_together("a", "b"))
        assert len(ranks["a"].adopted) == 2, "it served in its generation meanwhile"

    def test_a_preparation_that_takes_too_long_fails_and_says_of_whom(self, group: SimulatedGroup) -> None:
        group.form("a")
        group.add("b", never_finishes_preparing=True)
        group.ask("more", "a", "b")
        took = group.until(lambda: operation(group).phase is OperationPhase.FAILED)
        assert took > CONFIG.prepare_timeout_s
        assert operation(group).reason == "b did not prepare it within 3 s"

    def test_a_newcomer_that_dies_while_preparing_is_waited_for_again(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        b = group.add("b", never_finishes_preparing=True)
        group.ask("more", "a", "b")
        group.until(lambda: b.target is not None)
        b.alive = False
        group.until(lambda: operation(group).phase is OperationPhase.WAITING)
        group.add("b")
        group.until(lambda: group.serving_together("a", "b"))
        assert not ranks["a"].adopted[-1].urgent


class TestRecovery:
    @pytest.mark.parametrize("how", ["alive", "frozen"])
    def test_survivors_go_on_in_their_order(self, group: SimulatedGroup, how: str) -> None:
        ranks = group.form("a", "b", "c")
        setattr(ranks["b"], how, how == "frozen")
        took = group.until(lambda: group.serving_together("a", "c") or _only_frozen_is_left(group, ranks))
        assert took < 2.5
        generation = generation_of(ranks["a"])
        assert generation.urgent
        assert names_of(generation) == ["a", "c"]
        assert all({e for slots in layer for e in slots} == set(range(NUM_EXPERTS)) for layer in generation.placement)

    def test_whom_others_miss_is_dead_sooner(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["b"].frozen = True
        group.run(0.3)
        ranks["a"].phase, ranks["a"].suspects = RankPhase.BROKEN, (ranks["b"].id,)
        took = group.until(lambda: generation_of(ranks["a"]).size == 1)
        assert took < CONFIG.dead_after_s - 0.3

    def test_whom_others_miss_lives_while_it_reports(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["a"].phase, ranks["a"].suspects = RankPhase.BROKEN, (ranks["b"].id,)
        group.until(lambda: len(ranks["a"].adopted) == 2)
        assert names_of(generation_of(ranks["a"])) == ["a", "b"]
        assert generation_of(ranks["a"]).urgent

    def test_a_spare_rank_that_is_ready_comes_in_at_once(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["c"] = group.add("c", phase=RankPhase.LOADING)
        group.ask("more", "a", "b", "c")
        group.run(1.0)
        ranks["c"].phase = RankPhase.STANDBY
        ranks["a"].alive = False
        group.run(0.1)
        group.until(lambda: ranks["c"].generation is not None and ranks["a"].id not in str(ranks["c"].generation))
        assert names_of(generation_of(ranks["b"])) == ["b", "c"]

    def test_another_process_of_the_name_replaces_the_one_before(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        successor = group.add("b")  # the older one still answers
        group.until(lambda: successor.generation is not None)
        group.until(lambda: ranks["b"].generation is None)
        assert [each.instance_id for each in generation_of(successor).members] == [ranks["a"].id, successor.id]
        (old,) = [member for member in group.status().members if member.instance_id == ranks["b"].id]
        assert old.reason == "another process of this name has registered"

    def test_one_that_slept_through_is_dismissed_and_comes_back_as_a_newcomer(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["a"].frozen = True
        group.until(lambda: generation_of(ranks["b"]).size == 2)
        assert generation_of(ranks["a"]).size == 3
        ranks["a"].frozen = False
        group.until(lambda: ranks["a"].generation is None, seconds=1.0)
        group.until(lambda: group.serving_together("a", "b", "c"))
        assert names_of(generation_of(ranks["a"])) == ["b", "c", "a"], "its place is gone"

    def test_nobody_is_left(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        for rank in ranks.values():
            rank.alive = False
        group.run(3.0)
        assert group.status().generation == 0
        group.add("a")
        group.add("b")
        group.until(lambda: group.serving_together("a", "b"))
        assert group.status().generation > 1, "numbers do not begin anew"

    def test_newcomers_that_fail_do_not_hold_up_survivors(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.add("c", cannot_prepare=True)
        group.ask("more", "a", "b", "c")
        group.until(lambda: operation(group).phase is OperationPhase.FAILED)
        ranks["b"].alive = False
        took = group.until(lambda: generation_of(ranks["a"]).size == 1)
        assert took < 1.0

    def test_a_survivor_that_can_never_prepare_is_left_out_in_the_end(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["b"].cannot_prepare = True
        ranks["c"].alive = False
        group.until(lambda: generation_of(ranks["a"]).size == 1)
        group.until(lambda: ranks["b"].phase is RankPhase.STANDBY)

    def test_a_member_that_lost_its_generation_is_missed(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["b"].leave()
        group.until(lambda: group.serving_together("a", "b"))
        assert generation_of(ranks["a"]).urgent

    def test_a_pause_of_the_coordinator_kills_nobody(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.now += 60.0
        group.run(2.0)
        assert group.status().generation == 1


def _only_frozen_is_left(group: SimulatedGroup, ranks: dict[str, SimulatedRank]) -> bool:
    return ranks["b"].frozen and all(generation_of(ranks[name]).size == 2 for name in ("a", "c"))


class TestDuringACommit:
    def committed(self, group: SimulatedGroup, *blocked: str) -> dict[str, SimulatedRank]:
        """a, b -> b, c, committed; `blocked` ones do not adopt."""
        ranks = group.form("a", "b")
        ranks["c"] = group.add("c")
        for name in blocked:
            ranks[name].never_adopts = True
        group.ask("swap", "b", "c")
        group.until(lambda: operation(group).phase is OperationPhase.COMMITTING)
        return ranks

    @pytest.mark.parametrize("victim", ["a", "b", "c"])
    def test_a_death_leads_to_an_urgent_generation_above(self, group: SimulatedGroup, victim: str) -> None:
        ranks = self.committed(group, "b")
        committed = told(group, ranks["b"]).target
        assert committed is not None
        ranks[victim].alive = False
        ranks["b"].never_adopts = False
        survivors = [name for name in ("b", "c") if name != victim]
        group.until(lambda: group.serving_together(*survivors))
        last = generation_of(ranks[survivors[0]])
        # Without the vote of a retiring rank nobody adopts what was committed.
        assert last.number > committed.number or victim == "a"

    def test_ranks_that_answer_and_hang_get_an_urgent_generation(self, group: SimulatedGroup) -> None:
        ranks = self.committed(group, "b")
        committed = told(group, ranks["b"]).target
        assert committed is not None
        took = group.until(lambda: operation(group).kind == "recover")
        assert took > CONFIG.commit_timeout_s
        ranks["b"].never_adopts = False
        group.until(lambda: group.serving_together("b", "c"))
        assert generation_of(ranks["b"]).number == committed.number + 1

    def test_a_commit_that_hangs_before_anybody_adopted_it_is_not_taken_back(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["b"].never_adopts = True
        group.ask("less", "b")
        group.until(lambda: operation(group).kind == "recover")
        target = told(group, ranks["b"]).target
        assert target is not None
        assert (target.number, target.urgent) == (3, True)
        ranks["b"].never_adopts = False
        group.until(lambda: group.serving_together("b"))

    def test_a_rank_that_hangs_for_good_is_left_behind(self, group: SimulatedGroup) -> None:
        ranks = self.committed(group, "b")
        group.until(lambda: ranks["c"].generation is not None and ranks["c"].generation.size == 1, seconds=30.0)
        assert ranks["b"].phase is RankPhase.STANDBY

    def test_old_and_new_ranks_side_by_side_are_joined_above_both(self, group: SimulatedGroup) -> None:
        ranks = self.committed(group, "b")
        group.until(lambda: ranks["c"].generation is not None)  # newcomers do not wait for the vote
        ranks["a"].phase = RankPhase.BROKEN
        ranks["b"].never_adopts = False
        group.until(lambda: group.serving_together("b", "c"))
        assert generation_of(ranks["b"]).number > ranks["c"].adopted[0].number


class TestStandingStill:
    """The process answers, the loop does not."""

    def test_who_alone_does_not_come_to_an_exchange_is_left_out(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["b"].hangs = Activity.RESTS
        took = group.until(lambda: generation_of(ranks["a"]).size == 2)
        assert CONFIG.stall_after_s < took < CONFIG.stall_after_s + 1.5
        assert generation_of(ranks["a"]).urgent
        group.until(lambda: recovered(group), seconds=1.0)
        assert told(group, ranks["b"]).dismissed
        (b,) = [member for member in group.status().members if member.name == "b"]
        assert "its loop stands still" in b.reason
        ranks["b"].hangs = None
        group.until(lambda: group.serving_together("a", "b", "c"))

    def test_who_hangs_in_a_step_is_found_by_an_interruption(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["b"].hangs = ranks["b"].activity = Activity.RUNS
        took = group.until(lambda: generation_of(ranks["a"]).size == 2)
        assert CONFIG.step_stall_after_s < took < CONFIG.step_stall_after_s + CONFIG.stall_after_s + 1.5
        group.until(lambda: recovered(group), seconds=1.0)
        assert [member.name for member in generation_of(ranks["c"]).members] == ["a", "c"]

    def test_two_that_hang_are_both_left_out(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c", "d")
        for name in ("b", "c"):
            ranks[name].hangs = Activity.RESTS
        took = group.until(lambda: generation_of(ranks["a"]).size == 2)
        assert took < 2 * CONFIG.stall_after_s + 1.5

    def test_who_hangs_at_its_death_bed_is_left_out_of_the_recovery(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["b"].hangs = Activity.RESTS
        ranks["c"].alive = False
        took = group.until(lambda: generation_of(ranks["a"]).size == 1)
        assert took < CONFIG.dead_after_s + CONFIG.stall_after_s + 1.5

    def test_a_slow_step_is_run_again_with_more_time_and_costs_nobody_its_place(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        slow = ranks["b"]

        def run_slowly(seconds: float) -> None:
            """Both run a step that ends after `seconds`, or is interrupted."""
            start = group.now
            slow.hangs = slow.activity = Activity.RUNS
            while group.now - start < seconds and told(group, slow).target is None:
                group.step()
            slow.hangs = None
            group.until(lambda: told(group, slow).target is None and slow.phase is RankPhase.SERVING)

        run_slowly(CONFIG.step_stall_after_s + 1.0)
        assert generation_of(slow).number == 2, "asked in vain"
        assert generation_of(slow).placement == ranks["a"].adopted[0].placement
        run_slowly(CONFIG.step_stall_after_s + 1.0)
        assert generation_of(slow).number == 2, "it had twice the time"
        assert group.serving_together("a", "b")

    def test_idle_ranks_and_a_pause_of_the_coordinator_are_no_stall(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.run(10 * CONFIG.step_stall_after_s)
        ranks["b"].hangs = Activity.RESTS
        group.run(CONFIG.stall_after_s - 0.5)
        group.now += 60.0
        group.step()
        assert group.status().generation == 1
        ranks["b"].hangs = None
        group.run(2 * CONFIG.stall_after_s)
        assert generation_of(ranks["a"]).number == 1

    def test_nobody_waits_for_the_only_rank(self, group: SimulatedGroup) -> None:
        a = group.form("a")["a"]
        a.hangs = a.activity = Activity.RUNS
        group.run(3 * CONFIG.step_stall_after_s)
        assert told(group, a).target is None


class TestLeaving:
    def test_a_leaving_member_is_let_go_without_waiting_for_a_successor(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["a"].leaving = True
        took = group.until(lambda: group.serving_together("b"))
        assert took < 2.0
        assert not generation_of(ranks["b"]).urgent
        group.ask("again", "a", "b")
        group.run(CONFIG.wait_s + 1.0)
        assert ranks["a"].generation is None, "a process that leaves does not return"
        ranks["a"].alive = False
        successor = group.add("a")
        group.until(lambda: group.serving_together("a", "b"))
        assert generation_of(ranks["b"]).rank_of(successor.id) == 1

    def test_if_all_leave_they_are_let_go_when_the_last_request_has_ended(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["b"].num_requests = 1
        for rank in ranks.values():
            rank.leaving = True
        group.run(5.0)
        assert all(rank.phase is RankPhase.SERVING for rank in ranks.values()), "b needs the experts of a"
        ranks["b"].num_requests = 0
        group.until(lambda: all(rank.phase is RankPhase.STANDBY for rank in ranks.values()), seconds=0.5)
        group.run(5.0)
        assert all(len(rank.adopted) == 1 for rank in ranks.values())
        assert group.status().generation == 0

    def test_if_all_leave_but_one_that_is_dead_the_others_are_let_go(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        for name in ("a", "b"):
            ranks[name].leaving = True
        ranks["c"].alive = False
        group.until(lambda: all(ranks[name].phase is RankPhase.STANDBY for name in ("a", "b")), seconds=4.0)
        assert all(len(rank.adopted) == 1 for rank in ranks.values())

    def test_if_all_leave_and_one_dies_requests_end_in_a_generation_of_the_others(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        ranks["a"].num_requests = 1
        for rank in ranks.values():
            rank.leaving = True
        ranks["c"].alive = False
        group.until(lambda: generation_of(ranks["a"]).size == 2)
        ranks["a"].num_requests = 0
        group.until(lambda: all(ranks[name].phase is RankPhase.STANDBY for name in ("a", "b")), seconds=2.0)

    def test_if_all_leave_for_names_that_nobody_has_yet_they_do_not_wait_for_them(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.ask("others", "c", "d")
        for rank in ranks.values():
            rank.leaving = True
        group.until(lambda: all(rank.phase is RankPhase.STANDBY for rank in ranks.values()), seconds=0.5)
        group.add("c")
        group.add("d")
        group.until(lambda: group.serving_together("c", "d"))

    def test_if_all_leave_a_successor_takes_over_from_them(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.ask("others", "c")
        c = group.add("c", steps_to_prepare=20)
        group.until(lambda: operation(group).phase is OperationPhase.PREPARING)
        for rank in ranks.values():
            rank.leaving = True
        group.until(lambda: group.serving_together("c"))
        assert all(rank.phase is RankPhase.STANDBY for rank in ranks.values())
        assert not generation_of(c).urgent


class TestRestartedCoordinator:
    def test_knows_from_the_ranks_what_is_and_changes_nothing(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.start_controller()
        group.run(5.0)
        assert group.status().generation == 1
        assert group.status().desired == ["a", "b"]
        assert group.status().operation is None

    def test_counts_generations_on(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.start_controller()
        group.ask("less", "a")
        group.until(lambda: group.serving_together("a"))
        assert generation_of(ranks["a"]).number == 2
        assert all(number <= 2 for number in (target.number for target in group.targets.values()))

    def test_counts_on_from_what_standby_ranks_were_told(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.ask("less", "a")
        group.until(lambda: group.serving_together("a"))
        ranks["a"].alive = False
        group.start_controller()
        group.ask("other", "b")
        group.until(lambda: group.serving_together("b"))
        assert generation_of(ranks["b"]).number == 3

    def test_a_target_that_ranks_refuse_is_replaced_by_one_above(self, group: SimulatedGroup) -> None:
        a = group.form("a")["a"]
        b = group.add("b", never_finishes_preparing=True)
        group.ask("more", "a", "b")
        group.until(lambda: operation(group).phase is OperationPhase.PREPARING)
        # What a coordinator before this one had committed.
        a.generation = msgspec.structs.replace(generation_of(a), number=7, nonce="7.x")
        b.never_finishes_preparing = False
        b.steps_to_prepare = 100
        group.until(lambda: operation(group).generation == 8, seconds=1.0)
        group.until(lambda: group.serving_together("a", "b"))

    def test_says_nothing_before_all_had_time_to_report(self, group: SimulatedGroup) -> None:
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
        assert (operation(group).operation_id, operation(group).phase) == ("first", OperationPhase.DONE)
        assert len(ranks["a"].adopted) == 1

    def test_a_member_that_died_meanwhile_is_missed(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        ranks["b"].alive = False
        group.start_controller()
        group.until(lambda: generation_of(ranks["a"]).size == 1, seconds=4.0)

    def test_what_was_prepared_only_is_dropped(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        ranks["b"] = group.add("b")
        ranks["a"].never_finishes_preparing = True
        group.ask("more", "a", "b")
        group.until(lambda: ranks["b"].prepared)
        group.start_controller()
        group.until(lambda: ranks["b"].target is None)
        group.run(1.0)
        assert group.serving_together("a") or group.status().operation is None
        assert len(ranks["a"].adopted) == 1

    def test_a_commit_that_somebody_acted_on_is_shown_again(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        ranks["a"].never_adopts = True
        ranks["b"] = group.add("b")
        group.ask("more", "a", "b")
        group.until(lambda: ranks["b"].generation is not None)
        group.start_controller()
        group.until(lambda: group.status().operation is not None)
        assert (operation(group).phase, operation(group).operation_id) == (OperationPhase.COMMITTING, "more")
        ranks["a"].never_adopts = False
        group.until(lambda: group.serving_together("a", "b"))
        assert generation_of(ranks["a"]).number == 2

    def heard_by_some(self, group: SimulatedGroup) -> dict[str, SimulatedRank]:
        """a, b, c -> a, b, committed; b has not heard of it when another coordinator starts."""
        ranks = group.form("a", "b", "c")
        group.ask("less", "a", "b")
        group.until(lambda: operation(group).phase is OperationPhase.COMMITTING)
        ranks["b"].frozen = True
        group.until(lambda: ranks["a"].commit_seen == ranks["c"].commit_seen == "2.n2")
        group.start_controller()
        ranks["b"].inbox.clear()  # its connection is gone, with what it had not read
        ranks["b"].frozen = False
        return ranks

    def test_a_commit_that_some_heard_of_is_finished(self, group: SimulatedGroup) -> None:
        ranks = self.heard_by_some(group)
        group.until(lambda: len(ranks["a"].adopted) == 2)
        generation = generation_of(ranks["a"])
        assert (generation.number, generation.urgent) == (2, False)
        group.run(5.0)
        assert group.serving_together("a", "b")
        assert group.status().desired == ["a", "b"], "what was committed is what should be"
        assert len(ranks["a"].adopted) == 2, "once"

    def test_a_commit_that_some_heard_of_and_not_all_can_adopt_is_replaced_by_one_above(
        self, group: SimulatedGroup
    ) -> None:
        ranks = self.heard_by_some(group)
        ranks["b"].target, ranks["b"].prepared = None, False
        group.until(lambda: len(ranks["a"].adopted) == 2)
        assert generation_of(ranks["a"]).number == 3
        assert ranks["a"].target is None
        group.until(lambda: group.serving_together("a", "b"))
        group.run(5.0)
        assert len(ranks["a"].adopted) == 2, "once"

    def test_all_heard_of_a_commit(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b", "c")
        group.ask("less", "a", "b")
        group.until(lambda: operation(group).phase is OperationPhase.COMMITTING)
        group.start_controller()
        group.until(lambda: group.serving_together("a", "b") or len(ranks["a"].adopted) == 2)
        group.run(5.0)
        assert generation_of(ranks["a"]).number == 2
        assert group.status().desired == ["a", "b"]


class TestRequests:
    @pytest.mark.parametrize(
        ("members", "operation_id", "field"),
        [([], "o", "members"), (["a", ""], "o", "members"), (["a", "a"], "o", "members"), (["a"], "", "operation_id")],
    )
    def test_wrong_ones_are_refused_by_field(
        self, group: SimulatedGroup, members: list[str], operation_id: str, field: str
    ) -> None:
        refusal = group.controller.on_request(TopologyRequest(operation_id=operation_id, members=members), group.now)
        assert refusal is not None
        assert refusal.field == field
        assert group.status().desired == []

    def test_an_operation_id_stands_for_one_set_of_members(self, group: SimulatedGroup) -> None:
        group.ask("o", "a", "b")
        assert group.controller.on_request(TopologyRequest(operation_id="o", members=["b", "a"]), group.now) is None
        refusal = group.controller.on_request(TopologyRequest(operation_id="o", members=["a"]), group.now)
        assert refusal is not None
        assert refusal.field == "operation_id"

    def test_what_is_there_already_is_done_at_once(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.ask("same", "b", "a")
        group.step()
        assert (operation(group).operation_id, operation(group).phase) == ("same", OperationPhase.DONE)
        assert group.status().generation == 1


class TestRebalance:
    def uneven(self, group: SimulatedGroup, ranks: dict[str, SimulatedRank], tokens: int) -> set[int]:
        """All tokens of the first layer go to the first rank's experts, which are returned."""
        hot = set(generation_of(ranks["a"]).placement[0][0])
        loads = [[tokens if expert in hot else 0 for expert in range(NUM_EXPERTS)], [tokens] * NUM_EXPERTS]
        for rank in ranks.values():
            rank.loads = ExpertLoads(tuple(map(tuple, loads)))
        return hot

    def test_experts_move_on_request(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        hot = self.uneven(group, ranks, 100)
        group.run(0.5)
        before = generation_of(ranks["a"])
        group.controller.on_rebalance()
        group.until(lambda: len(ranks["a"].adopted) == 2)
        after = generation_of(ranks["a"])
        assert after.members == before.members
        assert all(len(hot & set(slots)) == 1 for slots in after.placement[0])
        group.until(lambda: operation(group).phase is OperationPhase.DONE)
        assert group.ended[-1].kind == "rebalance"
        assert group.ended[-1].moves == 2

    def test_experts_that_are_well_placed_stay(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.controller.on_rebalance()
        group.run(2.0)
        assert (operation(group).kind, operation(group).phase) == ("rebalance", OperationPhase.DONE)
        assert len(ranks["a"].adopted) == 1

    @pytest.mark.parametrize(("threshold", "generations"), [(1.2, 2), (0.0, 1)])
    def test_by_itself_only_if_configured_and_once(self, threshold: float, generations: int) -> None:
        group = SimulatedGroup(dataclasses.replace(CONFIG, rebalance_threshold=threshold, rebalance_window_s=2.0))
        ranks = group.form("a", "b")
        hot = self.uneven(group, ranks, 0)
        for tokens in range(150):
            loads = tuple(100 * tokens if expert in hot else 0 for expert in range(NUM_EXPERTS))
            for rank in ranks.values():
                rank.loads = ExpertLoads((loads, (tokens,) * NUM_EXPERTS))
            group.step()
        assert len(ranks["a"].adopted) == generations
