"""An expert-parallel group with random faults of pods, nodes and the coordinator.

The group reaches the desired state, and no member is deleted.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from baton_operator.plan.plan_group import Update
from support.operator.simulation.simulated_expert_group import Simulation


class Group(RuleBasedStateMachine):
    """`Simulation.reconcile` checks every step, and `Simulation.settle` the final state."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation()

    @rule(desired=st.integers(0, 5))
    def scale(self, desired: int) -> None:
        self.simulation.desired = desired

    @rule(revision=st.sampled_from(["r0", "r1", "r2"]))
    def change_the_template(self, revision: str) -> None:
        self.simulation.revision = revision

    @rule(model=st.sampled_from(["g", "h"]))
    def change_the_model(self, model: str) -> None:
        self.simulation.group = model

    @rule()
    def reconcile(self) -> None:
        self.simulation.reconcile()

    @rule(data=st.data(), seconds=st.sampled_from([1.0, 4.0, 40.0]))
    def time_passes(self, data: st.DataObject, seconds: float) -> None:
        self.simulation.reconcile()
        self.simulation.world(lambda: data.draw(st.booleans()), seconds)

    @rule(steps=st.integers(1, 12))
    def all_goes_well_for_a_while(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.reconcile()
            self.simulation.world(lambda: True, 1.0)

    @precondition(lambda self: self.simulation.pods)
    @rule(data=st.data())
    def a_container_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.simulation.pods)))
        self.simulation.container_dies(self.simulation.pods[name])

    @precondition(lambda self: self.simulation.pods)
    @rule(data=st.data())
    def a_pod_fails(self, data: st.DataObject) -> None:
        pod = self.simulation.pods[data.draw(st.sampled_from(sorted(self.simulation.pods)))]
        self.simulation.container_dies(pod)
        pod.failed = True

    @precondition(lambda self: self.simulation.pods)
    @rule(data=st.data())
    def a_pod_gets_work(self, data: st.DataObject) -> None:
        self.simulation.pods[
            data.draw(st.sampled_from(sorted(self.simulation.pods)))
        ].unfinished = 2

    @rule()
    def the_coordinator_dies(self) -> None:
        self.simulation.coordinator_dies()

    @rule()
    def the_coordinator_returns(self) -> None:
        self.simulation.coordinator_returns()

    @rule()
    def the_next_operation_will_fail(self) -> None:
        self.simulation.fail_next = True

    @rule(max_surge=st.integers(0, 2), max_unavailable=st.integers(0, 2))
    def change_the_bounds(self, max_surge: int, max_unavailable: int) -> None:
        self.simulation.update = Update(
            max_surge=max_surge,
            max_unavailable=max_unavailable or int(max_surge == 0),
            surge_timeout_s=10.0,
        )

    @rule(capacity=st.integers(1, 6))
    def nodes_come_and_go(self, capacity: int) -> None:
        self.simulation.capacity = capacity

    @precondition(lambda self: self.simulation.pods)
    @rule(data=st.data(), how=st.sampled_from(["pod_vanishes", "pod_is_deleted"]))
    def a_pod_goes(self, data: st.DataObject, how: str) -> None:
        pod = self.simulation.pods[data.draw(st.sampled_from(sorted(self.simulation.pods)))]
        getattr(self.simulation, how)(pod)

    @rule(refuses=st.integers(0, 2), loses=st.integers(0, 2))
    def the_coordinator_fails(self, refuses: int, loses: int) -> None:
        """An error status, a timeout and a broken connection are equivalent for the operator."""
        self.simulation.refuses, self.simulation.loses = refuses, loses

    def teardown(self) -> None:
        self.simulation.settle()
        self.simulation.capacity = self.simulation.desired
        self.simulation.revision = "on full nodes"
        self.simulation.settle()


TestGroup = Group.TestCase
TestGroup.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
