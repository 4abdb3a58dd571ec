"""The autoscaler with a simulated service: it reaches and keeps sizes that meet the targets.

The service in simulated time:

- Prefill: each engine computes one prompt at a time, in order. A request is sent to the engine with
  the least work.
- Decode: a step of n sequences takes `step_s + n * sequence_s`, and gives each sequence one token.
  A sequence uses `1 / max_sequences` of the engine's KV blocks. Sequences that do not fit wait.
- New engines need LOAD_S to become ready. Engines that are removed drain.
- Histograms have fine buckets, so that the formulas see exact latencies.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.metrics.request_metrics import Histogram as EngineHistogram
from baton_operator.autoscale import windows
from baton_operator.autoscale.decision_history import History
from baton_operator.autoscale.holds import RoleState
from baton_operator.autoscale.policy import Behavior, Bounds, Decision, decide
from baton_operator.autoscale.recommendations import Targets
from baton_operator.autoscale.windows import ScrapedSample, Snapshot, Window, window
from baton_operator.names import MEMBER_ROLES, MemberRole

TICK_S = 0.25
LOAD_S = 45.0
PERIOD_S = 15.0
FINE_S = tuple(0.001 * 1.25**power for power in range(55))


@dataclass
class Engine:
    ready_at: float
    leaves: bool = False
    histograms: dict[str, EngineHistogram] = field(
        default_factory=lambda: {
            name: EngineHistogram(name, FINE_S) for name in windows.ENGINE_HISTOGRAMS
        }
    )
    #: Prefill: time at which all its prompts are computed.
    free_at: float = 0.0
    #: Prefill: requests without a first token.
    prompts: int = 0
    #: Decode: tokens of a sequence that runs from the start.
    served: float = 0.0
    #: Decode: heap of `served` at which sequences end.
    running: list[float] = field(default_factory=list)
    #: Decode: tokens of waiting sequences.
    waiting: list[float] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.prompts or self.running or self.waiting)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)


@dataclass
class Workload:
    #: Mean time of a prompt on an idle engine. Prompts vary by a factor of two in both directions.
    prefill_s: float = 0.2
    #: Mean number of generated tokens.
    tokens: int = 100
    step_s: float = 0.010
    sequence_s: float = 0.0005
    max_sequences: int = 100


_BOUNDS = Bounds(1, 16)


class Simulation:
    """A simulated service.

    Args:
        rate: function from time in seconds to requests per second.
        prefill_bounds, decode_bounds: bounds of the number of engines.
        start: initial number of engines by role; by default the minimum, but at least 1.
    """

    def __init__(
        self,
        rate: Callable[[float], float],
        targets: Targets,
        *,
        workload: Workload | None = None,
        prefill_bounds: Bounds = _BOUNDS,
        decode_bounds: Bounds = _BOUNDS,
        start: dict[MemberRole, int] | None = None,
        seed: int = 1,
    ) -> None:
        self.now = 0.0
        self.rate, self.targets = rate, targets
        self.behavior = Behavior()
        self.workload = workload or Workload()
        self.bounds: dict[MemberRole, Bounds] = {"prefill": prefill_bounds, "decode": decode_bounds}
        sizes = start or {role: max(1, bounds.min) for role, bounds in self.bounds.items()}
        self.engines: dict[MemberRole, dict[str, Engine]] = {role: {} for role in MEMBER_ROLES}
        self.histories = dict.fromkeys(MEMBER_ROLES, History())
        self.decisions: list[tuple[float, Decision]] = []
        self.sizes: list[tuple[float, dict[MemberRole, int]]] = []
        #: (prompt seconds, tokens) of requests without a decode engine.
        self.held: list[tuple[float, float]] = []
        self._wanted = dict(sizes)
        self._random = random.Random(seed)
        self._names = count()
        #: (time, order, prefill engine, arrival, start, number of tokens) of future first tokens.
        self._events: list[tuple[float, int, Engine, float, float, float]] = []
        self._arrived = self._requests = 0
        self._snapshots: list[Snapshot] = []
        for role, size in sizes.items():
            self._make(role, size, ready_at=0.0)

    def run(self, until: float) -> None:
        next_period = self.now + PERIOD_S
        while self.now < until:
            self._tick()
            if self.now >= next_period:
                next_period += PERIOD_S
                self._scrape()
                self._decide()

    def size(self, role: MemberRole) -> int:
        return self._wanted[role]

    def changes(self, role: MemberRole, since: float = 0.0) -> list[int]:
        """Return the changes of the group's size since `since`, in order: +1, -2, ..."""
        return [
            b[role] - a[role]
            for (_, a), (at, b) in pairwise(self.sizes)
            if at >= since and a[role] != b[role]
        ]

    def latency(self, role: MemberRole) -> float | None:
        """Return the p95 of the last window in seconds: TTFT for prefill, ITL for decode."""
        measured = self._window()
        assert measured is not None, "nothing was scraped"
        return measured.roles[role].ttft_s if role == "prefill" else measured.roles[role].itl_s

    def _window(self) -> Window | None:
        start = self.now - self.behavior.window_s
        return window(self._snapshots, start=start, fresh_s=2.5 * PERIOD_S, quantile=0.95)

    def _make(self, role: MemberRole, number: int, ready_at: float) -> None:
        for _ in range(number):
            self.engines[role][f"{role}-{next(self._names)}/0"] = Engine(
                ready_at, served=0.0, free_at=ready_at
            )

    def _takers(self, role: MemberRole) -> list[Engine]:
        return [e for e in self.engines[role].values() if not e.leaves and e.ready_at <= self.now]

    def _tick(self) -> None:
        self.now += TICK_S
        while self._events and self._events[0][0] <= self.now:
            self._first_token(*heapq.heappop(self._events))
        expected = self.rate(self.now) * TICK_S
        arrivals = int(expected) + (self._random.random() < expected % 1)
        for _ in range(arrivals):
            prompt_s = self.workload.prefill_s * self._random.uniform(0.5, 1.5)
            self.held.append((prompt_s, self.workload.tokens * self._random.uniform(0.5, 1.5)))
        held, self.held = self.held, []
        for request in held:
            self._arrive(*request)
        for engine in self.engines["decode"].values():
            self._step(engine)
        for engines in self.engines.values():
            for name in [
                name for name, engine in engines.items() if engine.leaves and engine.empty
            ]:
                del engines[name]

    def _arrive(self, prompt_s: float, tokens: float) -> None:
        takers = self._takers("prefill")
        if not takers or not self._takers("decode"):
            self.held.append((prompt_s, tokens))
            return
        engine = min(takers, key=lambda e: e.free_at)
        start = max(self.now, engine.free_at)
        engine.free_at = start + prompt_s
        engine.prompts += 1
        self._arrived += 1
        heapq.heappush(
            self._events, (engine.free_at, next(self._names), engine, self.now, start, tokens)
        )

    def _first_token(
        self, when: float, _: int, engine: Engine, arrival: float, start: float, tokens: float
    ) -> None:
        engine.prompts -= 1
        engine.observe(windows.TTFT, when - arrival)
        engine.observe(windows.QUEUE_TIME, start - arrival)
        engine.observe(windows.PREFILL_TIME, when - start)
        decoder = min(self._takers("decode") or list(self.engines["decode"].values()), key=_load)
        decoder.waiting.append(tokens)

    def _step(self, engine: Engine) -> None:
        while engine.waiting and len(engine.running) < self.workload.max_sequences:
            heapq.heappush(engine.running, engine.served + engine.waiting.pop(0))
        if not engine.running:
            return
        itl = self.workload.step_s + self.workload.sequence_s * len(engine.running)
        engine.observe(windows.ITL, itl, max(1, round(len(engine.running) * TICK_S / itl)))
        engine.served += TICK_S / itl
        while engine.running and engine.running[0] <= engine.served:
            heapq.heappop(engine.running)
            self._requests += 1

    def _scrape(self) -> None:
        samples = {
            name: self._sample(role, engine)
            for role, engines in self.engines.items()
            for name, engine in engines.items()
            if engine.ready_at <= self.now
        }
        in_flight = float(
            len(self.held) + sum(map(_load, self.engines["decode"].values())) + len(self._events)
        )
        samples["gateway/0"] = ScrapedSample(
            None,
            {windows.IN_FLIGHT: in_flight, windows.HELD: float(len(self.held))},
            {},
            float(self._requests),
        )
        self._snapshots = [*self._snapshots[-20:], Snapshot(self.now, samples)]

    def _sample(self, role: MemberRole, engine: Engine) -> ScrapedSample:
        gauges = {
            windows.RUNNING: float(len(engine.running) or min(1, engine.prompts)),
            windows.WAITING: float(len(engine.waiting) + max(0, engine.prompts - 1)),
            windows.WAITING_FOR_REMOTE_KV: 0.0,
            windows.KV_USAGE: len(engine.running) / self.workload.max_sequences,
        }
        known = {
            name: windows.CumulativeHistogram(dict(h.cumulative()), h.sum)
            for name, h in engine.histograms.items()
        }
        return ScrapedSample(role, gauges, known)

    def _decide(self) -> None:
        measured = self._window()
        for role in MEMBER_ROLES:
            engines = self.engines[role].values()
            group = RoleState(
                role=role, size=self._wanted[role], pods=len(engines), ready=len(self._takers(role))
            )
            decision = decide(
                self.now,
                group,
                self.bounds[role],
                self.targets,
                measured,
                self.histories[role],
                self.behavior,
            )
            self.histories[role] = decision.history
            self.decisions.append((self.now, decision))
            self._resize(role, decision.size)
        self.sizes.append((self.now, dict(self._wanted)))

    def _resize(self, role: MemberRole, size: int) -> None:
        staying = [engine for engine in self.engines[role].values() if not engine.leaves]
        self._make(role, size - len(staying), ready_at=self.now + LOAD_S)
        for engine in sorted(staying, key=_load)[: max(0, len(staying) - size)]:
            engine.leaves = True
        self._wanted[role] = size


def _load(engine: Engine) -> int:
    return len(engine.running) + len(engine.waiting) + engine.prompts


TARGETS = Targets(ttft_s=1.0, itl_s=0.025)


def assert_meets_targets(simulation: Simulation) -> None:
    ttft_s, itl_s = simulation.latency("prefill"), simulation.latency("decode")
    assert ttft_s is not None
    assert itl_s is not None
    assert ttft_s <= 1.1 * simulation.targets.ttft_s
    assert itl_s <= 1.1 * simulation.targets.itl_s


@pytest.mark.parametrize("start", [3, 10])
def test_sizes_for_a_constant_load_are_reached_from_both_sides_and_kept(start: int) -> None:
    # 20 prompts of 0.2 s keep 4 engines busy. 2000 tokens per second on 2 decode engines take
    # 20 ms each.
    simulation = Simulation(lambda _: 20.0, TARGETS, start={"prefill": start, "decode": start})
    simulation.run(100 * PERIOD_S)
    assert_meets_targets(simulation)
    assert 5 <= simulation.size("prefill") <= 6
    assert 2 <= simulation.size("decode") <= 3
    simulation.run(160 * PERIOD_S)
    assert_meets_targets(simulation)
    assert [simulation.changes(role, since=100 * PERIOD_S) for role in MEMBER_ROLES] == [[], []]


def test_sizes_follow_a_step_of_load_without_oscillation() -> None:
    up_s, down_s, end_s = 600.0, 2100.0, 3600.0
    simulation = Simulation(
        lambda t: 30.0 if up_s < t < down_s else 6.0, TARGETS, start={"prefill": 2, "decode": 1}
    )
    simulation.run(up_s)
    before = {role: simulation.size(role) for role in MEMBER_ROLES}
    simulation.run(up_s + 50 * PERIOD_S)
    assert_meets_targets(simulation)
    assert simulation.size("prefill") >= 8
    simulation.run(end_s)
    assert_meets_targets(simulation)
    for role in MEMBER_ROLES:
        assert simulation.size(role) <= before[role] + 1
        signs = [step > 0 for step in simulation.changes(role, since=up_s)]
        turns = sum(a != b for a, b in pairwise(signs))
        assert turns == 1, f"{role}: {simulation.changes(role, since=up_s)}"


def test_decode_engines_with_few_kv_blocks_reach_a_stable_size() -> None:
    # Two engines of 20 sequences would stay full, because more sequences make each one slower.
    simulation = Simulation(
        lambda _: 20.0,
        Targets(ttft_s=1.0, itl_s=0.2),
        workload=Workload(max_sequences=20),
        start={"prefill": 6, "decode": 6},
    )
    simulation.run(2400.0)
    assert simulation.size("decode") == 3
    assert all(step < 0 for step in simulation.changes("decode"))


def test_a_service_scales_to_zero_and_back() -> None:
    simulation = Simulation(
        lambda t: 5.0 if t < 300 or 1500 < t < 2100 else 0.0,
        TARGETS,
        prefill_bounds=Bounds(0, 8),
        decode_bounds=Bounds(0, 8),
        start={"prefill": 2, "decode": 1},
    )
    simulation.run(1500.0)
    assert [simulation.size(role) for role in MEMBER_ROLES] == [0, 0]
    simulation.run(1500.0 + 2 * PERIOD_S)
    assert [simulation.size(role) for role in MEMBER_ROLES] == [1, 1]
    simulation.run(2100.0)
    assert not simulation.held
    assert_meets_targets(simulation)
    simulation.run(3300.0)
    assert [simulation.size(role) for role in MEMBER_ROLES] == [0, 0]


def test_a_target_that_no_size_can_meet_does_not_scale_to_the_maximum() -> None:
    simulation = Simulation(
        lambda _: 3.0, Targets(ttft_s=0.1, itl_s=0.008), start={"prefill": 4, "decode": 1}
    )
    simulation.run(1800.0)
    assert simulation.size("prefill") <= 5
    reasons = {decision.reason for _, decision in simulation.decisions[-2:]}
    assert "TargetUnreachable" in reasons


@settings(max_examples=4, deadline=None)
@given(
    rate=st.floats(1.0, 40.0),
    start=st.integers(1, 12),
    bounds=st.tuples(st.integers(1, 4), st.integers(5, 16)),
    seed=st.integers(0, 99),
)
def test_any_constant_load_settles_at_a_size_in_bounds(
    rate: float, start: int, bounds: tuple[int, int], seed: int
) -> None:
    low, high = bounds

    def simulated(until: float) -> Simulation:
        simulation = Simulation(
            lambda _: rate,
            TARGETS,
            prefill_bounds=Bounds(low, high),
            decode_bounds=Bounds(low, high),
            start={"prefill": start, "decode": start},
            seed=seed,
        )
        simulation.run(until)
        return simulation

    simulation = simulated(1800.0)
    for role in MEMBER_ROLES:
        later = [sizes[role] for at, sizes in simulation.sizes if at > PERIOD_S]
        assert all(low <= size <= high for size in later)
        signs = [step > 0 for step in simulation.changes(role, since=600.0)]
        assert sum(a != b for a, b in pairwise(signs)) <= 1, simulation.changes(role)
        assert len(simulation.changes(role, since=1350.0)) <= 1, simulation.changes(role)
    again = simulated(450.0).decisions
    assert again == simulation.decisions[: len(again)], (
        "equal measurements led to different decisions"
    )
