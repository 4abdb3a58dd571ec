"""Collects a rank's reports on its generations, for the coordinator, metrics and `get_stats`."""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.elastic.rank.waves import Waves
from baton_engine.executor.base import ModelInfo
from baton_engine.expert_parallel.standby_generation import StandbyGeneration
from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.topology_stats import TopologyStats
from baton_protocol.topology import ExpertLoads, Generation, RankPhase, Status, TopologyMember


@dataclass(slots=True)
class RankReport:
    """State from which one rank's `Status` and topology statistics are made.

    For a field with the same name as a field of `Status`, see `Status`.
    """

    member: TopologyMember
    info: ModelInfo
    num_redundant_experts: int
    counts: TopologyStats
    commit_seen: str = ""
    failed: str = ""
    failure: str = ""
    suspects: tuple[str, ...] = ()
    loads: ExpertLoads | None = None
    leaving: bool = False

    def on_target(self) -> None:
        """Clear the failure of the previous target's preparation.

        Call this method when the rank gets a new target: a generation to prepare.
        """
        if self.failed:
            self.failed = self.failure = ""

    def on_progress(self, standby: StandbyGeneration) -> None:
        """Record whether `standby` has failed, and whether its commit was received."""
        if standby.failure and self.failed != standby.generation.nonce:
            self.failed, self.failure = standby.generation.nonce, standby.failure
        if standby.committed:
            self.commit_seen = standby.generation.nonce

    def on_generation_changed(self) -> None:
        """Clear the failure, unreachable members and expert loads of the previous generation."""
        self.failed = self.failure = ""
        self.suspects, self.loads = (), None

    def on_broken(self, reason: str) -> None:
        self.failure = reason
        self.counts.num_broken += 1

    def status(
        self,
        phase: RankPhase,
        generation: Generation | None,
        standby: StandbyGeneration | None,
        stats: EngineStats,
    ) -> Status:
        """Return this rank's status, which is sent to the coordinator."""
        return Status(
            member=self.member,
            phase=phase,
            num_experts=self.info.num_experts,
            num_sparse_layers=self.info.num_sparse_layers,
            num_redundant_experts=self.num_redundant_experts,
            generation=generation,
            prepared=standby.generation.nonce if standby is not None and standby.ready else "",
            commit_seen=self.commit_seen,
            failed=self.failed,
            failure=self.failure,
            suspects=self.suspects,
            num_running=stats.num_requests_running,
            num_waiting=stats.num_requests_waiting,
            loads=self.loads,
            leaving=self.leaving,
            committed=standby.generation if standby is not None and standby.committed else None,
            expert_bytes=self.info.expert_bytes,
        )

    def topology(
        self, phase: RankPhase, generation: Generation | None, waves: Waves | None
    ) -> TopologyStats:
        """Set the gauges of `counts` from the arguments, and return `counts`."""
        counts, rank = self.counts, None
        counts.phase = phase
        counts.generation = counts.size = 0
        if generation is not None:
            counts.generation, counts.size = generation.number, generation.size
            rank = generation.rank_of(self.member.instance_id)
        counts.rank = rank or 0
        counts.wave, counts.wave_running = (
            (waves.wave, waves.running) if waves is not None else (0, False)
        )
        return counts
