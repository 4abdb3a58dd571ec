"""DPEngineCore: the engine core of a rank in an expert-parallel group.

All ranks step together. A generation is one version of the group's topology. The states of a rank:

serving   a step is: schedule, exchange votes, execute, update. `elastic.rank.waves` decides from
          the votes whether a rank without tokens runs a dummy batch.
changing  the next generation, called target, is prepared in the background
          (`standby_generation`), then committed between two steps. Requests stay.
broken    the step in flight is discarded. Requests stay until the next generation is committed.
left      requests end with ErrorCode.DRAINING, and the gateway continues them elsewhere.

This module uses no sockets. Messages arrive through `on_directive` and `on_start_wave`, and leave
through `WaveSender` and `status`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton_engine.core.engine_core import EngineCore
from baton_engine.core.pause import PauseMode, SleepLevel
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.elastic.rank.waves import StepDecision, StepVote, Waves, vote_for
from baton_engine.executor.base import Executor
from baton_engine.executor.step import SchedulerOutput
from baton_engine.expert_parallel.rank_status import RankReport
from baton_engine.expert_parallel.retired_groups import RetiredGroups
from baton_engine.expert_parallel.standby_generation import (
    CALL_TIMEOUT_S,
    POLL_INTERVAL_S,
    Join,
    StandbyGeneration,
)
from baton_engine.expert_parallel.vote_group import VoteGroup, WaveSender
from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.request_metrics import Histogram
from baton_engine.metrics.topology_stats import TopologyStats, commit_pauses
from baton_engine.scheduling.request_limits import refusal_of
from baton_engine.scheduling.scheduler_state import PauseState
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest, ErrorCode, Ready
from baton_protocol.options.config import EngineConfig
from baton_protocol.topology import (
    Activity,
    Directive,
    Generation,
    RankPhase,
    StartWave,
    Status,
    TopologyMember,
)

logger = logging.getLogger(__name__)

#: Maximum age of the experts' loads in a Status, in seconds.
LOADS_INTERVAL_S = 5.0
NO_SLEEP = (
    "an engine with parallel.enable_expert_parallel cannot sleep, because the other ranks of its "
    "group use its experts; remove it from the group first"
)


class DPEngineCore(EngineCore):
    """The engine core of one rank of an expert-parallel group.

    Other threads may call only `interrupt`.
    """

    survivable = (GroupBrokenError,)

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        member: TopologyMember,
        wave_sender: WaveSender,
        join: Join,
        unreachable: Callable[[Sequence[TopologyMember]], tuple[str, ...]] = lambda members: (),
        wakeup: Callable[[], None],
        pauses: Mapping[str, Histogram] | None = None,
        **hooks: Any,
    ) -> None:
        """Create a rank that is not in a generation (version of the group's topology) yet.

        Args:
            config: configuration of the engine.
            executor: runs the model.
            member: name, instance id and addresses of this rank.
            wave_sender: announces waves to the other ranks.
            join: joins the `VoteGroup` of a generation.
            unreachable: takes members, and returns the instance ids of those that cannot be
                reached. It is called in another thread.
            wakeup: wakes the engine's loop, which then calls `advance`. Other threads call this
                function.
            pauses: histograms from `topology_stats.commit_pauses`. None: create new histograms.
            **hooks: further keyword arguments of EngineCore.
        """
        super().__init__(config, executor, **hooks)
        self.phase = RankPhase.STANDBY
        self.generation: Generation | None = None
        #: Current Status.step and .activity. Any thread may read it, also while a step hangs.
        self.position: tuple[int, Activity] = (0, Activity.RESTS)
        self._instance_id = member.instance_id
        counts, redundant = TopologyStats(phase=self.phase), config.parallel.num_redundant_experts
        self._report = RankReport(member, self.info, redundant, counts)
        self._pauses = commit_pauses() if pauses is None else pauses
        self._wave_sender = wave_sender
        self._join = join
        self._unreachable = unreachable
        self._wakeup = wakeup
        self._waves: Waves | None = None
        self._standby: StandbyGeneration | None = None
        self._retired = RetiredGroups()
        self._broken_at = 0.0
        self._next_loads = 0.0
        #: Prevents interrupts while the generation changes.
        self._group_lock = threading.Lock()
        self._group: VoteGroup | None = None

    @property
    def rank(self) -> int | None:
        """Rank in the current generation, which may be broken. None if in no generation."""
        return self.generation.rank_of(self._instance_id) if self.generation is not None else None

    @property
    def ready(self) -> Ready:
        ready = super().ready
        if self.generation is not None:
            ready.data_parallel_rank, ready.data_parallel_size = (
                self.rank or 0,
                self.generation.size,
            )
        return ready

    @property
    def has_requests(self) -> bool:
        return super().has_requests or self._must_step

    @property
    def is_changing(self) -> bool:
        """Whether a generation is being prepared or committed.

        If so, call `advance` every POLL_INTERVAL_S.
        """
        standby = self._standby
        return standby is not None and (standby.committed if standby.ready else not standby.failure)

    # Messages from the coordinator and from other ranks

    def on_directive(self, directive: Directive) -> None:
        """Prepare, commit, drop or leave a generation, as the coordinator's directive requires.

        Call this method between steps.
        """
        target, standby = directive.target, self._standby
        if directive.dismissed:
            self._drop_standby()
            if self.generation is not None:
                self._leave(
                    f"the group continues without this rank of generation {self.generation.number}"
                )
            return
        if target is None:
            if standby is not None and not standby.committed:
                self._drop_standby()
            return
        rank = target.rank_of(self._instance_id)
        if rank is None if self.generation is None else target.number <= self.generation.number:
            return  # for other ranks, or not newer than the current generation
        if target.urgent and self.phase is RankPhase.SERVING and self.generation is not None:
            self._break(f"the coordinator replaces generation {self.generation.number}")
            if standby is not None and standby.committed and standby.ready:
                # Commit the earlier target first, because other ranks may have committed it.
                self.advance()
                self.on_directive(directive)
                return
        if self._standby is None or self._standby.generation.nonce != target.nonce:
            if self._standby is not None and self._standby.committed and self._standby.ready:
                return  # a commit is final
            self._drop_standby()
            self._report.on_target()
            logger.info(
                "the engine core prepares generation %d (operation %s)",
                target.number,
                target.operation_id or "-",
            )
            self._standby = StandbyGeneration(
                target, rank, self.generation, self.executor, self._join, self._wakeup
            )
        if directive.commit and self._standby is not None:
            self._standby.committed = True
        self.advance()

    def on_start_wave(self, start: StartWave) -> None:
        """Join the wave that another rank has started.

        If the wave belongs to the next generation, join it after this rank has committed that
        generation. Ignore waves of other generations. Call this method between steps.
        """
        if self._waves is not None and self._is_in(start):
            self._waves.on_start(start)
        elif self._standby is not None and start.nonce == self._standby.generation.nonce:
            self._standby.keep(start)
            self.advance()

    def interrupt(self, directive: Directive) -> None:
        """Stop waiting for other ranks if the directive is urgent or dismisses this rank.

        A directive is urgent if its target replaces the current generation without a vote.
        Thread-safe. The caller must also pass the directive to `on_directive` between steps.
        """
        target = directive.target
        with self._group_lock:
            generation, group = self.generation, self._group
            if generation is None or group is None:
                return
            if directive.dismissed or (
                target is not None and target.urgent and target.number > generation.number
            ):
                group.abort()
                self.executor.interrupt(generation.nonce)

    def _is_in(self, start: StartWave) -> bool:
        generation = self.generation
        return generation is not None and (start.generation, start.nonce) == (
            generation.number,
            generation.nonce,
        )

    # Changes of the generation

    def advance(self) -> None:
        """Commit the next generation if it is prepared and this rank is not serving.

        The commit must have been requested, by the coordinator or by another rank's wave. A serving
        rank commits after a vote instead, see `_vote_and_run`. Also close an old vote group after
        its grace period. While serving, read the load of each expert every LOADS_INTERVAL_S.
        """
        now = time.monotonic()
        standby = self._standby
        if standby is not None:
            standby.advance(now)
            self._report.on_progress(standby)
            if standby.committed and standby.ready and self.phase is not RankPhase.SERVING:
                self._commit(standby)
        self._retired.advance()
        if self.phase is RankPhase.SERVING and now >= self._next_loads:
            self._next_loads = now + LOADS_INTERVAL_S
            self._report.loads = self.executor.collective_rpc(
                "expert_loads", timeout_s=CALL_TIMEOUT_S
            )[0]

    def _commit(self, standby: StandbyGeneration) -> None:
        """Commit a prepared generation.

        If this rank is a member of the generation, it serves in that generation. Otherwise it
        leaves the group.
        """
        generation, started = standby.generation, time.monotonic()
        self._standby = None
        if standby.rank is None:
            self._leave(f"generation {generation.number} continues without this rank")
            return
        with self._group_lock:
            # The workers are between two steps here.
            self.executor.collective_rpc(
                "commit_generation", (generation.nonce,), timeout_s=CALL_TIMEOUT_S
            )
            self._retired.add(self._group)
            self._group, self.generation = standby.take_group(), generation
        kind, since = (
            ("broken", self._broken_at) if self.phase is RankPhase.BROKEN else ("planned", started)
        )
        self.phase = RankPhase.SERVING
        self._report.on_generation_changed()
        self._wave_sender.set_peers(
            [each for each in generation.members if each.instance_id != self._instance_id]
        )
        self._waves = Waves(generation.number, generation.nonce)
        if standby.start is not None:
            self._waves.on_start(standby.start)
        pause_s = time.monotonic() - since
        self._pauses[kind].observe(pause_s)
        logger.info(
            "generation %d committed as rank %d of %d (operation %s); steps paused for %.4f s",
            generation.number,
            standby.rank,
            generation.size,
            generation.operation_id or "-",
            pause_s,
        )

    def _break(self, reason: str) -> None:
        """Mark the current generation as broken, and stop waiting for other ranks.

        Requests wait until the next generation is committed.
        """
        generation = self.generation
        assert generation is not None, "only a generation can break"
        self.phase, self._waves = RankPhase.BROKEN, None
        self._broken_at = time.monotonic()
        self._report.on_broken(reason)
        logger.warning(
            "generation %d is broken (rank %d, operation %s), and requests wait for the next "
            "generation: %s",
            generation.number,
            self.rank or 0,
            generation.operation_id or "-",
            reason,
        )
        self._wave_sender.end_start()
        with self._group_lock:
            group, self._group = self._group, None
            # This ends the waits of other ranks and of this engine's workers.
            if group is not None:
                group.abort()
                group.close()
            self.executor.interrupt(generation.nonce)
        threading.Thread(
            target=self._find_suspects, args=(generation,), name="suspects", daemon=True
        ).start()

    def _find_suspects(self, generation: Generation) -> None:
        suspects = self._unreachable(
            [each for each in generation.members if each.instance_id != self._instance_id]
        )
        with self._group_lock:
            if self.phase is RankPhase.BROKEN and self.generation is generation:
                self._report.suspects = suspects
        self._wakeup()

    def _leave(self, reason: str) -> None:
        """End all requests and leave the group."""
        assert self.generation is not None, "only a member can leave"
        logger.info("this rank leaves generation %d: %s", self.generation.number, reason)
        self.fail_all(ErrorCode.DRAINING, f"{reason}; continue the request elsewhere")
        self._wave_sender.set_peers([])
        with self._group_lock:
            self._retired.add(self._group)
            self._group = self.generation = self._waves = None
            self.phase = RankPhase.STANDBY
            self._report.on_generation_changed()
            self.executor.collective_rpc("leave_generation", timeout_s=CALL_TIMEOUT_S)
        self._pause.advance()

    def _drop_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.drop()

    # Requests

    def add_request(self, request: EngineCoreRequest) -> EngineCoreOutput | None:
        if self.phase is RankPhase.STANDBY:
            self.scheduler.forget_refused(request.request_id)
            return refusal_of(
                request,
                ErrorCode.DRAINING,
                "this rank is in no generation; send the request to another rank",
            )
        return super().add_request(request)

    # Steps

    @property
    def _wants_vote(self) -> bool:
        """Whether this rank must now start a vote exchange to commit the next generation.

        The exchange is repeated every POLL_INTERVAL_S until all ranks vote for that generation.
        """
        standby = self._standby
        return (
            standby is not None
            and standby.committed
            and standby.ready
            and time.monotonic() >= standby.vote_due
        )

    @property
    def _must_step(self) -> bool:
        """Whether this rank must step with the other ranks.

        In such a step, a rank without tokens runs a dummy batch if another rank has tokens.
        """
        return self._waves is not None and (self._waves.running or self._wants_vote)

    def step(self) -> list[EngineCoreOutput]:
        self.advance()
        runs = self._must_step or self._can_start
        if runs:
            try:
                self._vote_and_run()
            finally:
                self._enter(Activity.RESTS)
            self._pause.advance()
        return self._end_step(runs, must_continue=self._must_step)

    def _schedule(self) -> SchedulerOutput:
        if self.phase is RankPhase.SERVING:
            return self.scheduler.schedule()
        # Without the other ranks' experts no tokens can run. Transfers continue.
        requested, self.scheduler.pause_state = self.scheduler.pause_state, PauseState.PAUSED_ALL
        try:
            return self.scheduler.schedule()
        finally:
            self.scheduler.pause_state = requested

    def _vote_and_run(self) -> None:
        """Schedule a step, exchange votes if necessary, and run the step.

        Votes are necessary in a generation that is not broken, if this rank has tokens or must step
        with the other ranks. If all ranks voted for the next generation, commit that generation
        after the step.
        """
        with self._records.begin() as record:
            step = record.on_scheduled(self._schedule())
        decision: StepDecision | None = None
        voted: StandbyGeneration | None = None
        if self._waves is not None and (step.num_scheduled_tokens or self._must_step):
            if self._standby is not None and self._standby.committed and self._standby.ready:
                voted = self._standby
            try:
                decision = self._vote(step, self._waves, voted)
            except (GroupBrokenError, TimeoutError) as error:
                self.scheduler.discard(step)
                self._break(str(error))
                step = step.without_tokens()
        if step.reaches_model_runner or step.connector or self.scheduler.has_work:
            record.step, record.started = step, time.monotonic()  # after the vote
            try:
                with record:
                    self.executor.execute_model(step)
                    grammar = self.scheduler.grammar_output(step)  # while the model runs
                    self._update(record, self._waiter.wait(self.executor.sample_tokens(grammar)))
            except GroupBrokenError as error:
                self.scheduler.discard(step)
                self._break(str(error))
        # Commit even if the step has failed, because the other ranks commit too.
        if decision is not None and decision.commit:
            assert voted is not None, "all ranks have voted for it"
            self._commit(voted)

    def _vote(
        self, step: SchedulerOutput, waves: Waves, voted: StandbyGeneration | None
    ) -> StepDecision:
        """Exchange votes with all ranks before a step, and return the decision from these votes.

        If no wave is running, start a wave first.

        Args:
            step: the scheduled step. If any rank has tokens, `wave_tokens` is set to each rank's
                number of tokens.
            waves: the waves of the current generation.
            voted: the prepared generation that this rank votes to commit. None: no such generation.

        Raises:
            GroupBrokenError: a rank is gone.
            TimeoutError: a rank did not vote within the timeout.
        """
        assert self._group is not None, "a rank with waves has a vote group"
        if not waves.running:
            self._wave_sender.start_wave(waves.begin())
        num_tokens = step.total_num_scheduled_tokens
        # Swapped-in requests run in the next step.
        vote = StepVote(num_tokens, int(bool(num_tokens or step.swap_in)))
        if voted is not None:
            vote = vote._replace(commit=vote_for(voted.generation.nonce))
        started = time.monotonic()
        self.position = (self.position[0] + 1, Activity.WAITS)
        try:
            votes = self._group.exchange(vote)
            self._enter(Activity.RUNS)
        finally:
            self._report.counts.exchange_seconds += time.monotonic() - started
        if voted is not None:
            voted.vote_due = time.monotonic() + POLL_INTERVAL_S
        self._wave_sender.end_start()
        # All ranks have exchanged votes in this generation, so no rank reads from an earlier group.
        self._retired.close_all()
        decision = waves.decide(votes)
        if any(decision.num_tokens):
            step.wave_tokens = decision.num_tokens
            self._report.counts.num_steps += 1
            self._report.counts.num_steps_without_tokens += not num_tokens
        return decision

    def _enter(self, activity: Activity) -> None:
        self.position = (self.position[0], activity)

    # Status

    def ask_to_leave(self) -> None:
        """Report `leaving` in the status, so that the coordinator removes this rank. Idempotent."""
        self._report.leaving = True

    def status(self) -> Status:
        """Return this rank's status for the coordinator."""
        return self._report.status(
            self.phase, self.generation, self._standby, self.scheduler.stats()
        )

    def recent_stats(self, *, max_connector_age_s: float) -> EngineStats:
        stats = super().recent_stats(max_connector_age_s=max_connector_age_s)
        stats.topology = self._report.topology(self.phase, self.generation, self._waves)
        return stats

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> Any:
        raise RuntimeError(NO_SLEEP)

    def wake_up(self, tags: list[str] | None = None) -> None:
        raise RuntimeError(NO_SLEEP)

    def shutdown(self) -> None:
        with self._group_lock:
            self._retired.add(self._group)
            self._group = self._waves = None
        self._drop_standby()
        self._retired.close_all()
        super().shutdown()
