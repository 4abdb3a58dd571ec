"""Random deaths, freezes, failures, restarts of the coordinator, network faults and requests.

After the disturbances end, the group reaches the requested state within a bounded time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from baton_protocol.topology import Activity, RankPhase
from support.elastic.simulated_group import SimulatedGroup
from support.elastic.simulated_rank import SimulatedRank

NAMES = ["a", "b", "c", "d"]
#: Several times longer than every deadline and backoff of the simulation.
REST_S = 60.0


class DisturbedGroup(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**16),
        first=st.sets(st.sampled_from(NAMES), min_size=1),
        form=st.booleans(),
    )
    def start(self, seed: int, first: set[str], form: bool) -> None:
        self.group = SimulatedGroup(seed=seed)
        self.operations = 0
        for name in sorted(first):
            self.group.add(name)
        self._ask(first)
        if form:
            self.group.until(lambda: self.group.serving_together(*first))

    @rule(steps=st.integers(1, 8))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.group.step()

    @rule(steps=st.integers(10, 60))
    def much_time_passes(self, steps: int) -> None:
        self.time_passes(steps)

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def other_members_are_asked_for(self, names: set[str]) -> None:
        self._ask(names)
        for name in names:
            if not self._running(name):
                self.group.add(name)

    @rule(name=st.sampled_from(NAMES))
    def another_process_starts(self, name: str) -> None:
        self.group.add(name)

    @rule(name=st.sampled_from(NAMES))
    def dies(self, name: str) -> None:
        for rank in self._running(name):
            rank.alive = False

    @rule(name=st.sampled_from(NAMES))
    def freezes(self, name: str) -> None:
        for rank in self._running(name):
            rank.frozen = True

    @rule(name=st.sampled_from(NAMES))
    def wakes_up(self, name: str) -> None:
        for rank in self._running(name):
            rank.frozen, rank.stalled_in = False, None

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from([Activity.RESTS, Activity.RUNS]))
    def stalls(self, name: str, how: Activity) -> None:
        for rank in self._running(name):
            rank.stalled_in = rank.activity = how

    @rule(name=st.sampled_from(NAMES), num_requests=st.integers(0, 2))
    def requests_come_and_end(self, name: str, num_requests: int) -> None:
        for rank in self._running(name):
            rank.num_requests = num_requests

    @rule(name=st.sampled_from(NAMES))
    def is_told_to_shut_down(self, name: str) -> None:
        for rank in self._running(name):
            rank.leaving = True

    @rule(
        name=st.sampled_from(NAMES),
        how=st.sampled_from(["cannot_prepare", "never_finishes_preparing", "never_commits"]),
    )
    def becomes_unable(self, name: str, how: str) -> None:
        for rank in self._running(name):
            setattr(rank, how, True)

    @rule(name=st.sampled_from(NAMES))
    def generation_breaks(self, name: str) -> None:
        for rank in self._running(name):
            if rank.phase is RankPhase.SERVING:
                rank.phase = RankPhase.BROKEN

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.group.start_controller()

    @rule(asked_again=st.booleans())
    def placement_is_asked_for(self, asked_again: bool) -> None:
        self.group.controller.on_rebalance()
        if asked_again:
            self.group.step()

    @rule(
        loss=st.sampled_from([0.0, 0.1, 0.5]),
        duplicates=st.sampled_from([0.0, 0.3]),
        delay=st.integers(0, 4),
    )
    def the_network_changes(self, loss: float, duplicates: float, delay: int) -> None:
        self.group.loss, self.group.duplicates, self.group.most_delay_steps = (
            loss,
            duplicates,
            delay,
        )

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self._calm_down()
            self._check_rest()

    def _calm_down(self) -> None:
        """End all disturbances. One process per name runs, and the network delivers."""
        group = self.group
        group.loss = group.duplicates = 0.0
        group.most_delay_steps = 0
        latest = {rank.member.name: rank for rank in group.ranks.values() if rank.alive}
        for rank in group.alive().values():
            rank.alive = rank is latest[rank.member.name]
            rank.stalled_in, rank.num_requests = None, 0
            rank.frozen = rank.cannot_prepare = rank.never_finishes_preparing = (
                rank.never_commits
            ) = False
        group.run(REST_S)

    def _check_rest(self) -> None:
        group = self.group
        status = group.status()
        picture = group.picture()
        alive = group.alive().values()
        generations = {
            rank.generation.nonce: rank.generation for rank in alive if rank.generation is not None
        }
        assert len(generations) <= 1, picture
        wanted = {
            rank.id for rank in alive if rank.member.name in status.desired and not rank.leaving
        }
        if not wanted:
            return
        (generation,) = generations.values() or [None]
        assert {member.instance_id for member in generation.members} == wanted, picture
        for rank in alive:
            assert rank.phase is (RankPhase.SERVING if rank.id in wanted else RankPhase.STANDBY), (
                picture
            )
            assert rank.target is None or rank.id not in wanted, (
                f"still prepares or votes\n{picture}"
            )
        assert status.operation is None or status.operation.phase in (
            "done",
            "waiting",
            "superseded",
        ), picture

    def _ask(self, names: set[str]) -> None:
        self.operations += 1
        self.group.ask(f"operation-{self.operations}", *sorted(names))

    def _running(self, name: str) -> list[SimulatedRank]:
        """Return the latest process of this name, if it is alive."""
        ranks = [rank for rank in self.group.ranks.values() if rank.member.name == name]
        return [rank for rank in ranks[-1:] if rank.alive]


def test_the_group_reaches_the_requested_state_after_any_disturbance() -> None:
    run_state_machine_as_test(
        DisturbedGroup,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
