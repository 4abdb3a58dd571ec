"""The controller's rules for scaling, requests and rebalancing."""

from __future__ import annotations

import dataclasses

import pytest

from baton_protocol.topology import ExpertLoads, OperationPhase, RankPhase, TopologyRequest
from support.elastic.simulated_group import CONFIG, STEP_S, SimulatedGroup, names_of
from support.elastic.simulated_rank import NUM_EXPERTS, SimulatedRank

WINDOW_S = 3.0


class TestScaling:
    def test_remaining_ranks_keep_their_order_and_new_ones_follow_by_name(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("b", "d")
        ranks |= {name: group.add(name) for name in ("c", "a")}
        group.ask("more", "a", "b", "c", "d")
        group.until(lambda: group.serving_together("a", "b", "c", "d"))
        generation = ranks["b"].generation
        assert names_of(generation) == ["b", "d", "a", "c"]
        assert not generation.urgent
        assert generation.store_host == ranks["b"].member.host
        assert group.operation.kind == "scale"
        assert set(group.operation.seconds) == {"waiting", "preparing", "committing"}

    def test_a_removed_member_votes_and_is_standby_before_the_operation_is_done(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a", "b", "c")
        group.ask("less", "b", "c")
        group.until(lambda: ranks["b"].committed[-1].number == 2)
        assert names_of(ranks["b"].generation) == ["b", "c"]
        assert ranks["a"].commit_seen == ranks["b"].generation.nonce, (
            "the removed rank did not vote"
        )
        group.until(lambda: group.operation.phase is OperationPhase.DONE, seconds=1.0)
        assert ranks["a"].phase is RankPhase.STANDBY
        assert group.directive_of(ranks["a"]).target is None

    def test_waits_for_a_new_rank_no_longer_than_wait_s(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.ask("swap", "a", "c")
        group.run(CONFIG.wait_s - 0.5)
        assert group.serving_together("a", "b")
        assert group.operation.phase is OperationPhase.WAITING
        group.until(lambda: group.serving_together("a"), seconds=2.0)
        group.add("c")  # it registers late
        group.until(lambda: group.serving_together("a", "c"), seconds=2.0)

    def test_a_topology_without_registered_members_is_not_committed(
        self, group: SimulatedGroup
    ) -> None:
        group.form("a")
        group.ask("away", "x")
        group.run(3 * CONFIG.wait_s)
        assert group.serving_together("a")

    def test_directives_carry_the_target_without_commit_until_all_have_prepared_it(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a")
        ranks["a"].steps_to_prepare = 12
        ranks["b"] = group.add("b")
        group.ask("more", "a", "b")
        group.until(lambda: ranks["b"].prepared)
        group.run(0.3)
        directives = [group.directive_of(rank) for rank in ranks.values()]
        assert all(each.target is not None and not each.commit for each in directives)
        assert ranks["a"].phase is RankPhase.SERVING
        group.until(lambda: group.serving_together("a", "b"))

    def test_a_newer_request_supersedes_an_uncommitted_operation(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a")
        ranks["b"] = group.add("b", never_finishes_preparing=True)
        ranks["c"] = group.add("c")
        group.ask("one", "a", "b")
        group.until(lambda: group.operation.phase is OperationPhase.PREPARING)
        group.ask("two", "a", "c")
        group.step()
        target = group.directive_of(ranks["a"]).target
        assert (names_of(target), target.number, target.operation_id) == (["a", "c"], 3, "two")
        group.until(lambda: group.serving_together("a", "c"))
        assert ranks["b"].target is None
        assert [(each.kind, each.outcome) for each in group.ended][1:] == [
            ("scale", "superseded"),
            ("scale", "done"),
        ]

    def test_a_newer_request_waits_for_the_end_of_a_commit(self, group: SimulatedGroup) -> None:
        ranks = group.form("a")
        ranks["b"] = group.add("b", never_commits=True)
        group.ask("one", "a", "b")
        group.until(lambda: group.operation.phase is OperationPhase.COMMITTING)
        group.ask("two", "a")
        group.step()
        assert group.directive_of(ranks["b"]).commit
        ranks["b"].never_commits = False
        group.until(lambda: group.serving_together("a"))
        assert [generation.operation_id for generation in ranks["a"].committed] == [
            "first",
            "one",
            "two",
        ]

    def test_a_failed_preparation_keeps_the_old_generation_and_is_retried_with_backoff(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a")
        b = group.add("b", cannot_prepare=True)
        group.ask("more", "a", "b")
        group.until(lambda: group.operation.phase is OperationPhase.FAILED)
        assert group.operation.reason == "b: the disk is full"
        assert ranks["a"].phase is RankPhase.SERVING
        pauses = []
        for attempt in (2, 3, 4):
            start = group.now
            group.until(lambda: group.operation.phase is OperationPhase.PREPARING)
            pauses.append(group.now - start)
            group.until(lambda: group.operation.phase is OperationPhase.FAILED)
            assert group.operation.generation == attempt + 1
        assert pauses == pytest.approx([0.5, 1.0, 2.0], abs=0.11)
        b.cannot_prepare = False
        group.until(lambda: group.serving_together("a", "b"))
        assert len(ranks["a"].committed) == 2, "the old generation did not serve during the retries"

    def test_a_preparation_that_times_out_fails_with_the_name_of_the_rank(
        self, group: SimulatedGroup
    ) -> None:
        group.form("a")
        group.add("b", never_finishes_preparing=True)
        group.ask("more", "a", "b")
        took = group.until(lambda: group.operation.phase is OperationPhase.FAILED)
        assert took > CONFIG.prepare_timeout_s
        assert group.operation.reason == "b did not prepare generation 2 within 3 s"

    def test_a_new_rank_that_dies_during_preparation_is_waited_for_again(
        self, group: SimulatedGroup
    ) -> None:
        ranks = group.form("a")
        b = group.add("b", never_finishes_preparing=True)
        group.ask("more", "a", "b")
        group.until(lambda: b.target is not None)
        b.alive = False
        group.until(lambda: group.operation.phase is OperationPhase.WAITING)
        group.add("b")
        group.until(lambda: group.serving_together("a", "b"))
        assert not ranks["a"].committed[-1].urgent


class TestRequests:
    @pytest.mark.parametrize(
        ("members", "operation_id", "field"),
        [
            ([], "o", "members"),
            (["a", ""], "o", "members"),
            (["a", "a"], "o", "members"),
            (["a"], "", "operation_id"),
        ],
    )
    def test_invalid_requests_are_refused_with_the_field(
        self, group: SimulatedGroup, members: list[str], operation_id: str, field: str
    ) -> None:
        refusal = group.controller.on_request(
            TopologyRequest(operation_id=operation_id, members=members)
        )
        assert refusal.field == field
        assert group.status().desired == []

    def test_an_operation_id_cannot_be_reused_for_other_members(
        self, group: SimulatedGroup
    ) -> None:
        group.ask("o", "a", "b")
        assert (
            group.controller.on_request(TopologyRequest(operation_id="o", members=["b", "a"]))
            is None
        )
        refusal = group.controller.on_request(TopologyRequest(operation_id="o", members=["a"]))
        assert refusal.field == "operation_id"

    def test_a_request_for_the_present_members_is_done_at_once(self, group: SimulatedGroup) -> None:
        group.form("a", "b")
        group.ask("same", "b", "a")
        group.step()
        assert (group.operation.operation_id, group.operation.phase) == (
            "same",
            OperationPhase.DONE,
        )
        assert group.status().generation == 1


class TestRebalance:
    def load_first_rank(
        self, group: SimulatedGroup, ranks: dict[str, SimulatedRank], tokens: int
    ) -> set[int]:
        """Send all tokens of the first layer to the first rank's experts. Return these."""
        hot = set(ranks["a"].generation.placement[0][0])
        loads = [
            [tokens if expert in hot else 0 for expert in range(NUM_EXPERTS)],
            [tokens] * NUM_EXPERTS,
        ]
        for rank in ranks.values():
            rank.loads = ExpertLoads(tuple(map(tuple, loads)))
        return hot

    def test_experts_move_on_request(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        hot = self.load_first_rank(group, ranks, 100)
        group.run(0.5)
        before = ranks["a"].generation
        group.controller.on_rebalance()
        group.until(lambda: len(ranks["a"].committed) == 2)
        after = ranks["a"].generation
        assert after.members == before.members
        assert all(len(hot & set(slots)) == 1 for slots in after.placement[0])
        group.until(lambda: group.operation.phase is OperationPhase.DONE)
        assert group.ended[-1].kind == "rebalance"
        assert group.ended[-1].moves == 2

    def test_balanced_experts_are_not_moved(self, group: SimulatedGroup) -> None:
        ranks = group.form("a", "b")
        group.controller.on_rebalance()
        group.run(2.0)
        assert (group.operation.kind, group.operation.phase) == ("rebalance", OperationPhase.DONE)
        assert len(ranks["a"].committed) == 1

    def test_rebalances_automatically_once_if_configured(self) -> None:
        group = self.automatic(rebalance_threshold=1.2)
        ranks = group.form("a", "b")
        self.run_skewed(group, ranks, seconds=15.0)
        assert len(ranks["a"].committed) == 2
        done = group.ended[-1]
        assert (done.kind, done.moves, done.moved_bytes) == ("rebalance", 2, 200)
        assert done.rebalancing is not None
        assert done.rebalancing.before == pytest.approx(1.5)
        assert done.rebalancing.after == pytest.approx(1.0)
        assert "1.50 times the mean load" in group.operation.reason
        assert group.controller.imbalance == pytest.approx(1.0), "measured in a later window"

    def test_is_off_without_a_threshold_but_measures_the_imbalance(self) -> None:
        group = self.automatic(rebalance_threshold=0.0)
        ranks = group.form("a", "b")
        self.run_skewed(group, ranks, seconds=15.0)
        assert len(ranks["a"].committed) == 1
        assert group.controller.imbalance == pytest.approx(1.5)

    def test_few_tokens_are_not_measured_until_there_are_more(self) -> None:
        group = self.automatic(rebalance_threshold=1.2)
        ranks = group.form("a", "b")
        self.run_skewed(group, ranks, seconds=8.0, tokens=3)
        assert group.controller.imbalance == 0.0
        self.run_skewed(group, ranks, seconds=8.0, tokens=3000)
        assert len(ranks["a"].committed) == 2

    def test_moves_no_more_bytes_than_the_limit(self) -> None:
        group = self.automatic(rebalance_threshold=1.2, rebalance_max_move_bytes=199.0)
        ranks = group.form("a", "b")
        self.run_skewed(group, ranks, seconds=15.0)
        assert len(ranks["a"].committed) == 1, "a swap of two experts of 100 bytes was made"
        group.controller.on_rebalance()
        self.run_skewed(group, ranks, seconds=5.0)
        assert len(ranks["a"].committed) == 2, "a request has no limit"

    @pytest.mark.parametrize(("limit", "warnings"), [(199.0, 1), (200.0, 0), (0.0, 0)])
    def test_a_limit_below_two_experts_is_logged_once(
        self, caplog: pytest.LogCaptureFixture, limit: float, warnings: int
    ) -> None:
        group = self.automatic(rebalance_threshold=1.2, rebalance_max_move_bytes=limit)
        self.run_skewed(group, group.form("a", "b"), seconds=15.0)
        logged = [text for text in caplog.messages if "two experts of 100 bytes" in text]
        assert len(logged) == warnings
        assert all("bytes=199 " in text and "to at least 200" in text for text in logged)

    def test_with_a_limit_ranks_must_report_the_size_of_experts(self) -> None:
        group = self.automatic(rebalance_threshold=1.2, rebalance_max_move_bytes=1e9)
        ranks = group.form("a", "b")
        ranks["b"].expert_bytes = 0
        self.run_skewed(group, ranks, seconds=15.0)
        assert len(ranks["a"].committed) == 1
        ranks["b"].expert_bytes = 100
        self.run_skewed(group, ranks, seconds=15.0)
        assert len(ranks["a"].committed) == 2

    def test_an_automatic_rebalance_does_not_end_a_scaling_that_waits(self) -> None:
        group = self.automatic(rebalance_threshold=1.2)
        ranks = group.form("a", "b")
        group.ask("grow", "a", "b", "c")
        group.run(CONFIG.wait_s + 1.0)
        self.run_skewed(group, ranks, seconds=15.0)
        assert (group.operation.kind, group.operation.phase) == ("scale", OperationPhase.WAITING)
        assert group.controller.imbalance == pytest.approx(1.5), "the measurement continues"
        group.add("c")
        group.until(lambda: group.serving_together("a", "b", "c"))
        assert [each.outcome for each in group.ended] == [OperationPhase.DONE] * 2

    def test_a_requested_rebalance_is_the_reason_why_a_waiting_scaling_ends(
        self, group: SimulatedGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        ranks = group.form("a", "b")
        self.load_first_rank(group, ranks, 100)
        group.ask("grow", "a", "b", "c")
        group.run(0.5)
        group.controller.on_rebalance()
        group.until(lambda: len(ranks["a"].committed) == 2)
        assert "operation grow (scale): superseded: a rebalance was requested" in caplog.text

    def test_a_failed_rebalance_is_tried_again_after_a_window_only(self) -> None:
        group = self.automatic(rebalance_threshold=1.2)
        ranks = group.form("a", "b")
        ranks["b"].cannot_prepare = True
        self.run_skewed(group, ranks, seconds=15.0)
        failed = [each for each in group.ended if each.outcome is OperationPhase.FAILED]
        assert 2 <= len(failed) <= 15.0 / WINDOW_S

    def automatic(self, **config: float) -> SimulatedGroup:
        return SimulatedGroup(dataclasses.replace(CONFIG, rebalance_window_s=WINDOW_S, **config))

    def run_skewed(
        self,
        group: SimulatedGroup,
        ranks: dict[str, SimulatedRank],
        seconds: float,
        tokens: int = 3000,
    ) -> None:
        """Send all tokens of the first layer to experts 0 and 2, which are on the first rank."""
        for _ in range(round(seconds / STEP_S)):
            for rank in ranks.values():
                count = tokens + (0 if rank.loads is None else rank.loads.tokens[0][0])
                rank.loads = ExpertLoads(((count, 0, count, 0), (count // 2,) * NUM_EXPERTS))
            group.step()
