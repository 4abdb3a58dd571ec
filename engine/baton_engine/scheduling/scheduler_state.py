"""State that the modules of the scheduler share: requests, queues, KV cache, limits, counters."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable

from baton_engine.grammar.structured_output import StructuredOutputManager
from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.scheduling.grammar_queue import GrammarQueue
from baton_engine.scheduling.handoff.kv_handoff import KVHandoff
from baton_engine.scheduling.prompt_budget import PromptBudget
from baton_engine.scheduling.queues import RunningRequests, SwappedRequests, WaitingRequests
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.request_limits import RequestLimits
from baton_engine.scheduling.request_outputs import RequestOutputs
from baton_engine.scheduling.sequence_groups.samples import SampleGroups
from baton_engine.scheduling.step.in_flight import RunAhead
from baton_engine.scheduling.step.worker_mirror import WorkerMirror
from baton_engine.scheduling.stop_rules import StopRules
from baton_protocol.options.config import SchedulerConfig


class PauseState(enum.Enum):
    """Pause state of a scheduler: which requests `Scheduler.schedule` may run."""

    #: All requests run.
    UNPAUSED = enum.auto()
    #: Running and swapped requests continue. No request is admitted.
    PAUSED_NEW = enum.auto()
    #: No tokens run. Transfers continue.
    PAUSED_ALL = enum.auto()


class SchedulerState:
    """State that the modules of the scheduler share."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        watermark_blocks: int = 0,
        fail_on_load_error: bool = False,
        num_stages: int = 1,
        structured_output: StructuredOutputManager | None = None,
    ) -> None:
        """Create a state without requests.

        Args:
            max_model_len: limit on the prompt plus generated tokens of a request.
            watermark_blocks: number of blocks that must stay free when a request is admitted or
                resumed while other requests run.
            fail_on_load_error: end a request whose KV load failed. If False, this engine computes
                the missing blocks.
            num_stages: number of pipeline stages. With more than one, workers get sampled tokens
                with the next step, because only the last stage samples.
            structured_output: compiles grammars. If None, requests that need grammars are refused.

        Raises:
            ValueError: `max_model_len` tokens do not fit in the KV cache.
        """
        self.config, self.kv, self.max_model_len = config, kv, max_model_len
        self.watermark_blocks = watermark_blocks
        self.fail_on_load_error = fail_on_load_error
        send_token_ids = num_stages > 1
        # With several stages, workers get a sampled token only with the next step. So no request
        # may be scheduled before the scheduler has the request's last token.
        self.run_ahead = RunAhead(config.async_scheduling and not send_token_ids, max_model_len)
        self.limits = RequestLimits.of(config, kv, max_model_len)
        #: All unfinished requests.
        self.requests: dict[str, Request] = {}
        self.running = RunningRequests(self.limits.max_num_seqs)
        self.queues = WaitingRequests()
        self.swapped = SwappedRequests()
        #: A token passes one pipeline stage per step, so each step gets an equal share of it.
        self.prompt_budget = PromptBudget(config.target_itl_s / num_stages)
        self.grammars = GrammarQueue(structured_output)
        self.groups = SampleGroups()
        #: Preempted requests, until their steps in flight have returned.
        self.awaiting_steps: dict[str, Request] = {}
        self.handoff = KVHandoff(kv)
        self.worker = WorkerMirror(send_token_ids=send_token_ids)
        self.stop_rules = StopRules(eos_token_ids, max_model_len)
        self.outputs = RequestOutputs()
        self.counters = EngineStats()

    def stats(self) -> EngineStats:
        """Return a copy of the statistics: counters since engine start, and gauges at this call."""
        stats = copy.copy(self.counters)
        stats.num_requests_running = len(self.running)
        stats.num_requests_waiting = len(self.requests) - len(self.running)
        stats.num_requests_swapped = len(self.swapped)
        stats.num_requests_waiting_for_remote_kv = len(self.queues.waiting_to_load) + len(
            self.queues.loading
        )
        stats.num_transfers_held = self.handoff.num_held
        stats.kv_cache_usage = self.kv.usage
        stats.prefix_cache_queries = self.kv.stats.queries
        stats.prefix_cache_hits = self.kv.stats.hits
        if (offload := self.kv.offload) is not None:
            stats.offload_blocks = len(offload)
            stats.offload_blocks_stored = offload.num_stored
            stats.offload_blocks_restored = offload.num_restored
        stats.requests_finished = {
            str(reason): count for reason, count in self.outputs.num_finished.items()
        }
        return stats
