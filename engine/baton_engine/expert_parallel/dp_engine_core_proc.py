"""DPEngineCoreProc: the process of a rank in an expert-parallel group.

link thread (rank_link)  Directive and StartWave -> input queue of the main thread
main thread              Status and StartWave -> link thread

States: LOADING, STANDBY, SERVING (or BROKEN), then STANDBY again. READY is sent to clients when a
generation is committed. On SIGTERM the rank requests a generation without itself. It remains a
member until that generation is committed or `drain_timeout_s` has passed.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_engine.distributed.process_group import is_before
from baton_engine.distributed.store.handshake import store_secret
from baton_engine.distributed.store.store_server import StoreServer, open_store
from baton_engine.elastic.rank.rank_link import RankLink, unreachable
from baton_engine.elastic.rank_name import RANK_NAME
from baton_engine.executor.base import Executor
from baton_engine.expert_parallel.dp_engine_core import DPEngineCore
from baton_engine.expert_parallel.standby_generation import POLL_INTERVAL_S
from baton_engine.expert_parallel.vote_group import VoteGroup, join_vote_group
from baton_engine.metrics.topology_stats import commit_pauses
from baton_engine.models.errors import ConfigurationError
from baton_engine.server.admin_server import ProbeResult
from baton_engine.server.engine_core_proc import (
    IDLE_INTERVAL_S,
    EngineCoreProc,
    ShutdownKind,
    State,
)
from baton_engine.server.engine_io import Input
from baton_protocol.engine_messages import EngineCoreRequestType as RequestType
from baton_protocol.engine_messages import Pong
from baton_protocol.options.config import EngineConfig
from baton_protocol.topology import (
    Directive,
    Generation,
    RankPhase,
    StartWave,
    Status,
    TopologyMember,
)

#: Phases in which requests are accepted. In BROKEN, requests wait for the next generation.
_ACCEPTING = (RankPhase.SERVING, RankPhase.BROKEN)
#: A loop counts as stalled if it does not process a dismissal (`Directive.dismissed`) within this
#: time.
DISMISSED_PATIENCE_S = 10.0


class DPEngineCoreProc(EngineCoreProc):
    """The engine process of one expert-parallel rank.

    It has connections to the coordinator and to the other ranks.
    """

    def __init__(self, config: EngineConfig, host: str) -> None:
        """Bind the ports for clients (engine port) and for other ranks (link port).

        Raises:
            zmq.ZMQError: a port cannot be bound.
            ConfigurationError: the rank's name is invalid, or the service key cannot be read.
        """
        name = rank_name(config)
        if not RANK_NAME.fullmatch(name):
            message = (
                f"parallel.rank_name: {name!r} is not a DNS label: use at most 63 characters of "
                "a-z, 0-9 and -, and start and end with a letter or digit"
            )
            raise ConfigurationError("InvalidConfig", message)
        super().__init__(config, host)
        self.phase = RankPhase.LOADING
        self.commit_pauses = commit_pauses()
        self._host = host
        self._core: DPEngineCore | None = None
        self._member: TopologyMember
        #: This rank's rendezvous store. It is open as long as this process runs.
        self._store: StoreServer
        #: The generation of the last READY sent to clients.
        self._announced: Generation | None = None
        #: Arrival time of a dismissal that the loop has not processed yet.
        self._dismissed_at: float | None = None
        try:
            self._link = RankLink(
                host,
                config.parallel.coordinator,
                deliver=self._deliver_from_link,
                amend=self._amend,
                key=self.access.key,
            )
        except Exception:
            self.io.close()
            raise

    def run(self) -> int:
        self._store = open_store(self._host, secret=store_secret(self.access.key))
        self._member = TopologyMember(
            name=rank_name(self.config),
            instance_id=self.instance_id,
            host=self._host,
            engine_port=self.io.port,
            link_port=self._link.port,
            store_port=self._store.address.port,
        )
        self._link.publish(Status(self._member, RankPhase.LOADING))
        self._link.start()
        try:
            return super().run()
        finally:
            self._link.close()
            self._store.close()

    def _make_core(self, executor: Executor) -> EngineCore:
        self._core = DPEngineCore(
            self.config,
            executor,
            member=self._member,
            wave_sender=self._link,
            join=self._join,
            unreachable=unreachable,
            wakeup=self.io.wake_engine,
            pauses=self.commit_pauses,
            take_aborts=self._owners.take_aborts,
            request_metrics=self.request_metrics,
            on_executor_failure=self._on_executor_failure,
        )
        return self._core

    def _join(self, generation: Generation, rank: int) -> VoteGroup:
        parallel = self.config.parallel
        # In an exchange, a rank waits until the other ranks have ended their steps.
        return join_vote_group(
            generation,
            rank,
            join_timeout_s=parallel.collective_timeout_s,
            timeout_s=parallel.step_timeout_s,
            secret=store_secret(self.access.key),
        )

    # For other threads

    def readiness(self) -> ProbeResult:
        result = super().readiness()
        if result.ok and not self._is_accepting:
            message = (
                "this rank is in no generation of the group; see the coordinator's GET /topology"
            )
            return ProbeResult(
                False, msgspec.structs.replace(result.body, reason="Standby", message=message)
            )
        return result

    def _make_pong(self) -> Pong:
        pong = super()._make_pong()
        pong.draining = pong.draining or not self._is_accepting
        return pong

    @property
    def _is_accepting(self) -> bool:
        return self.phase in _ACCEPTING and self._dismissed_at is None

    def _amend(self, status: Status) -> Status:
        if self._core is None:
            return status
        step, activity = self._core.position
        return msgspec.structs.replace(status, step=step, activity=activity)

    def _deliver_from_link(self, message: Directive | StartWave) -> None:
        if self._core is None:
            return  # the message is repeated
        if isinstance(message, Directive):
            self._on_dismissal(message.dismissed)
            self._core.interrupt(message)
            self.io.input_queue.put(Input(RequestType.WAKEUP, payload=message))
        else:
            self.io.input_queue.put(Input(RequestType.START_DP_WAVE, payload=message))

    def _on_dismissal(self, dismissed: bool) -> None:
        """Record whether this rank is dismissed. Fail the process if its loop is stalled.

        A dismissed rank is no longer part of the group. The coordinator repeats a dismissal, so
        this method is called again. If the loop does not process the dismissal within
        DISMISSED_PATIENCE_S, the process fails. Its clients then receive a DEAD message, and the
        gateway continues their requests elsewhere.

        Args:
            dismissed: `Directive.dismissed` of the received directive.
        """
        now, since = time.monotonic(), self._dismissed_at
        if not dismissed:
            self._dismissed_at = None
        elif since is None:
            self._dismissed_at = now
        elif now - since > DISMISSED_PATIENCE_S and self.state is State.SERVING:
            self._on_executor_failure(
                "the group continues without this rank, because its loop is stalled"
            )

    # The loop

    def _announce(self, core: EngineCore) -> None:
        self._publish(core)

    def _take_input(self, core: EngineCore, message: Input) -> None:
        if isinstance(message.payload, Directive):
            _rank(core).on_directive(message.payload)
            self._dismissed_at = None
        elif isinstance(message.payload, StartWave):
            _rank(core).on_start_wave(message.payload)
        else:
            super()._take_input(core, message)

    def _step(self, core: EngineCore) -> bool:
        _rank(core).advance()
        busy = super()._step(core)
        self._deliver(core.take_outputs())
        self._publish(core)
        self.idle_interval_s = POLL_INTERVAL_S if _rank(core).is_changing else IDLE_INTERVAL_S
        return busy

    def _publish(self, core: EngineCore) -> None:
        """Publish this rank's status to the coordinator.

        If the rank has moved to another generation, also announce that to the clients.
        """
        rank = _rank(core)
        self.phase = rank.phase
        self._link.publish(rank.status())
        generation = rank.generation
        if generation is not None and generation is not self._announced:
            self._announced = generation
            self._store.forget(is_before(generation.number))
            super()._announce(core)

    def _advance_shutdown(self, core: EngineCore) -> bool:
        rank = _rank(core)
        rank.ask_to_leave()
        may_stop = super()._advance_shutdown(core)
        self._publish(core)
        deadline = self._shutdown_deadline
        # Other ranks need this rank's experts until a generation without this rank is committed.
        needed = rank.generation is not None and rank.generation.size > 1
        in_time = (
            self._shutdown is ShutdownKind.DRAIN
            and deadline is not None
            and time.monotonic() < deadline
        )
        return may_stop and not (needed and in_time)


def rank_name(config: EngineConfig) -> str:
    """Return this rank's name in topologies: the configured name, $POD_NAME or the host name."""
    return config.parallel.rank_name or os.environ.get("POD_NAME") or socket.gethostname()


def _rank(core: Any) -> DPEngineCore:
    assert isinstance(core, DPEngineCore), "this process creates no other core"
    return core
