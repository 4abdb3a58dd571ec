"""Prometheus metrics of the coordinator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton_engine.elastic.coordinator.operation import Ended
from baton_protocol.topology import ACTIVE_PHASES, OperationPhase, RankPhase, TopologyStatus

KINDS = ("form", "scale", "recover", "rebalance")
OUTCOMES = (OperationPhase.DONE, OperationPhase.FAILED, OperationPhase.SUPERSEDED)
#: Upper bounds of the buckets of phase durations, in seconds.
SECONDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    480.0,
)


class CoordinatorMetrics:
    """The Prometheus metrics of the coordinator, and their registry."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._operations = Counter(
            "baton:topology_operations",
            "Topology operations that have ended.",
            ["kind", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "baton:topology_operation_phase_seconds",
            "Time that topology operations spent in a phase.",
            ["kind", "phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self._moves = Counter(
            "baton:topology_expert_moves",
            "Experts that ranks received for committed generations.",
            registry=registry,
        )
        self._moved_bytes = Counter(
            "baton:topology_expert_moved_bytes",
            "Bytes of the experts that ranks received for committed generations.",
            registry=registry,
        )
        self._imbalance = Gauge(
            "baton:topology_expert_imbalance",
            "Load of the busiest rank divided by the mean load of the ranks, averaged over the "
            "sparse layers, in the last measuring window. 0: not measured.",
            registry=registry,
        )
        self._rebalance_imbalance = Gauge(
            "baton:topology_rebalance_imbalance",
            "Imbalance before and after the last automatic rebalance, for the loads measured "
            "before it. 0: no rebalance yet.",
            ["when"],
            registry=registry,
        )
        self._generation = Gauge(
            "baton:topology_generation",
            "Number of the generation that the group is in.",
            registry=registry,
        )
        self._members = Gauge(
            "baton:topology_members",
            "Members of the generation, by phase.",
            ["phase"],
            registry=registry,
        )
        self._others = Gauge(
            "baton:topology_others",
            "Registered processes that are not members, by phase.",
            ["phase"],
            registry=registry,
        )
        self.statuses = Counter(
            "baton:topology_statuses", "Valid statuses received from ranks.", registry=registry
        )
        self.bad_messages = Counter(
            "baton:topology_bad_messages",
            "Messages that were dropped because they are not valid statuses.",
            registry=registry,
        )
        self.refused = Counter(
            "baton:topology_refused",
            "Connections and requests that were refused because they lack the service's key.",
            ["door"],
            registry=registry,
        )
        for door in ("ranks", "http"):
            self.refused.labels(door)
        for when in ("before", "after"):
            self._rebalance_imbalance.labels(when)
        for kind in KINDS:  # a rate needs the sample 0 before the first event
            for outcome in OUTCOMES:
                self._operations.labels(kind, outcome)
            for phase in ACTIVE_PHASES:
                self._seconds.labels(kind, phase)

    def on_ended(self, ended: Ended) -> None:
        """Add an ended operation to the metrics: its outcome, durations by phase and moved experts.

        If the operation is an automatic rebalance that was committed, also set the gauges of the
        imbalance before and after it.
        """
        self._operations.labels(ended.kind, ended.outcome).inc()
        for phase, seconds in ended.seconds.items():
            self._seconds.labels(ended.kind, phase).observe(seconds)
        self._moves.inc(ended.moves)
        self._moved_bytes.inc(ended.moved_bytes)
        if ended.rebalancing is not None:
            self._rebalance_imbalance.labels("before").set(ended.rebalancing.before)
            self._rebalance_imbalance.labels("after").set(ended.rebalancing.after)

    def text(self, status: TopologyStatus, imbalance: float) -> bytes:
        """Set the gauges from the arguments, and return all metrics in the Prometheus text format.

        Args:
            status: the current topology.
            imbalance: imbalance of the last measuring window.
        """
        self._imbalance.set(imbalance)
        self._generation.set(status.generation)
        for phase in RankPhase:
            those = [member.rank for member in status.members if member.phase is phase]
            self._members.labels(phase).set(sum(rank is not None for rank in those))
            self._others.labels(phase).set(sum(rank is None for rank in those))
        return generate_latest(self._registry)
