"""Parts of the scheduler: its state and its collaborators, and how they are connected."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from baton_engine.grammar.structured_output import StructuredOutputManager
from baton_engine.kv_cache.manager import KVCacheManager
from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.scheduling.admission import Admission
from baton_engine.scheduling.grammar_queue import GrammarQueue
from baton_engine.scheduling.groups.beams import BeamSearches
from baton_engine.scheduling.groups.samples import SampleGroups
from baton_engine.scheduling.handoff.kv_handoff import KVHandoff
from baton_engine.scheduling.handoff.remote_prefill import RemotePrefill
from baton_engine.scheduling.planner import RunningPlanner
from baton_engine.scheduling.preemption import Preemptor
from baton_engine.scheduling.queues import RunningRequests, WaitingRequests
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.request_outputs import RequestOutputs
from baton_engine.scheduling.step_builder import ScheduledRange
from baton_engine.scheduling.step_results import StepResults
from baton_engine.scheduling.stop_rules import StopRules
from baton_engine.scheduling.worker_mirror import WorkerMirror
from baton_protocol.config import SchedulerConfig


class PauseState(enum.Enum):
    """What `schedule` may run."""

    UNPAUSED = enum.auto()
    #: Running and swapped requests continue. No request is admitted.
    PAUSED_NEW = enum.auto()
    #: No tokens run. Transfers continue.
    PAUSED_ALL = enum.auto()


class SchedulerParts:
    """The base of `Scheduler`, which has the methods."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        num_swap_blocks: int = 0,
        fail_on_load_error: bool = False,
        send_token_ids: bool = False,
        structured_output: StructuredOutputManager | None = None,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            max_model_len: limit of prompt plus generated tokens. It must fit the KV memory.
            num_swap_blocks: host blocks of the KV cache manager. 0 disables swapping.
            fail_on_load_error: end a request whose KV did not arrive, instead of computing the rest
                here.
            send_token_ids: some workers do not have the sampled tokens (pipeline stages), so the
                next step carries them.
            structured_output: compiles grammars. None: requests that need one are refused.

        Raises:
            ValueError: the configuration contradicts itself; the message says how.
        """
        if max_model_len > kv.pool.num_blocks * kv.block_size:
            raise ValueError(
                f"max_model_len={max_model_len} exceeds "
                f"{kv.pool.num_blocks} blocks of {kv.block_size} tokens"
            )
        self.config = config
        self.kv = kv
        self.handoff = KVHandoff(kv)
        self.max_model_len = max_model_len
        # Each running sequence needs budget for one token.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        #: All unfinished requests.
        self.requests: dict[str, Request] = {}
        self.running = RunningRequests()
        self.queues = WaitingRequests()
        self.draining = False
        self.pause_state = PauseState.UNPAUSED
        #: The last step ran tokens, moved requests or carried metadata for the connector, so that
        #: another step may find work.
        self.made_progress = False

        self._stop_rules = StopRules(eos_token_ids, max_model_len)
        self._worker = WorkerMirror(send_token_ids=send_token_ids)
        self._beams = BeamSearches(kv, self._worker, max_model_len)
        self._counters = EngineStats()
        self._outputs = RequestOutputs()
        self._groups = SampleGroups()
        self.grammars = GrammarQueue(structured_output)
        self._preemptor = Preemptor(
            config.preemption_mode,
            kv,
            self.running,
            self.queues.loaded,
            max_num_seqs=self.max_num_seqs,
            can_swap=num_swap_blocks > 0,
        )
        self._planner = RunningPlanner(
            kv,
            self.running,
            self.queues.waiting,
            self._preemptor,
            self._beams,
            max_model_len=max_model_len,
            # Only the worker has the token behind a placeholder, so it cannot be sent.
            runs_ahead=config.async_scheduling and not send_token_ids,
            long_prefill_threshold=config.long_prefill_token_threshold,
        )
        self._admission = Admission(
            kv,
            self.queues,
            self.running,
            self._groups,
            max_num_seqs=self.max_num_seqs,
            chunked=config.enable_chunked_prefill,
        )
        self._remote_prefill = RemotePrefill(
            kv,
            self.handoff,
            self.queues,
            self._counters,
            self._stop_rules,
            fail_on_load_error=fail_on_load_error,
        )
        self._results = StepResults(
            kv, self._outputs, self._counters, self._stop_rules, self._worker, self._beams
        )
        #: Preempted requests, until their steps in flight have returned.
        self._awaiting_steps: dict[str, Request] = {}
        self._in_flight: dict[int, list[ScheduledRange]] = {}
        self._num_steps = 0
