"""Decides when a CONSUME request, whose prompt a peer computes, can continue.

Two events must happen, in any order: the block load ends, and the gateway's PREFILL_RESULT arrives.
This engine computes missing blocks itself, unless `load_failure_policy` is `fail`.
"""

from __future__ import annotations

from collections import OrderedDict

from baton_engine.scheduling.decisions import Finished, Queued
from baton_engine.scheduling.request import Request, RequestStatus
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_protocol.engine_messages import ErrorCode, FinishReason, PrefillResult

#: Maximum number of prefill results that are kept for requests that have not arrived.
EARLY_RESULTS_KEPT = 1024


class RemotePrefill:
    """Continues a request when its block load and its prefill stage on a peer have both ended."""

    def __init__(self, state: SchedulerState) -> None:
        self.kv = state.kv
        self.handoff = state.handoff
        self.queues = state.queues
        self.stop_rules = state.stop_rules
        self.counters = state.counters
        #: End a request whose KV load failed. If False, this engine computes the missing blocks.
        self.fail_on_load_error = state.fail_on_load_error
        #: Results of requests that have not arrived, by request id. None: the request has ended or
        #: was refused, and a late result must not reach a later request with the same id.
        self._early_results: OrderedDict[str, PrefillResult | None] = OrderedDict()

    def take_early(self, request_id: str) -> PrefillResult | None:
        """Remove and return the prefill result kept by `remember_early`. None if there is none."""
        return self._early_results.pop(request_id, None)

    def remember_early(self, result: PrefillResult) -> None:
        """Keep a prefill result until its request arrives.

        Ignore later results with the same request id.
        """
        if result.request_id not in self._early_results:
            self._remember(result.request_id, result)

    def forget(self, request_id: str) -> None:
        """Discard stored and later results of a request that has ended or was refused.

        A late result must not reach another request with the same id.
        """
        self._remember(request_id, None)

    def add_result(self, request: Request, result: PrefillResult) -> list[Finished | Queued]:
        """Record the result of the request's prefill stage.

        Returns:
            The decisions of `end_load_if_ready` if the request's load has started. If the prefill
            stage fails before the load, and `fail_on_load_error` is False: the decision to queue
            the request, so that this engine computes the prompt. In all other cases, an empty list.
        """
        if (
            request.status is not RequestStatus.WAITING_FOR_REMOTE_KV
            or request.prefill_result is not None
        ):
            return []
        request.prefill_result = result
        waiting_to_load = self.queues.waiting_to_load
        if request in waiting_to_load:
            if not result.token_ids and result.error and not self.fail_on_load_error:
                # No peer computes the prompt, so this engine does.
                waiting_to_load.discard(request)
                self.handoff.decline(request)
                request.kv_transfer = None
                num_cached = (
                    len(self.kv.find_cached_prefix(request, request.num_arrival_tokens))
                    * self.kv.block_size
                )
                self.counters.kv_transfer_recomputed_tokens += (
                    request.num_arrival_tokens - num_cached
                )
                return [Queued(request)]
            return []
        if result.error:
            self.handoff.cancel_load(request)
        return self.end_load_if_ready(request)

    def end_load_if_ready(self, request: Request) -> list[Finished | Queued]:
        """Continue or end a request whose load and prefill stage have both ended.

        Returns:
            The decision to continue or end the request. If a failed load ends the request, the list
            also ends the requests of its `SampleGroup` that wait for this load. The list is empty
            while the load or the prefill stage is in progress.
        """
        result, prefill = self.handoff.load_result(request), request.prefill_result
        if result is None or prefill is None:
            return []
        num_cached = request.num_computed_tokens
        num_verified = min(
            num_cached + result.num_valid_blocks * self.kv.block_size,
            request.num_arrival_tokens,
        )
        if num_verified < request.num_arrival_tokens and self.fail_on_load_error:
            error = result.error or prefill.error or "the prefill side did not send all KV blocks"
            return [
                Finished.without_token(sample, FinishReason.ERROR, ErrorCode.KV_LOAD, error)
                for sample in _samples_of_load(request)
            ]
        self.handoff.end_load(request)
        del self.queues.loading[request.request_id]
        request.kv_transfer = None  # the hand-off has ended
        self.counters.prompt_tokens_remote += max(
            0, min(num_verified, request.num_prompt_tokens) - num_cached
        )
        self.counters.kv_transfer_recomputed_tokens += max(
            0, request.num_arrival_tokens - max(num_verified, num_cached)
        )
        request.token_ids.extend(prefill.token_ids)
        # Without a first token from the peer, the last loaded token runs here again.
        request.num_computed_tokens = min(num_verified, request.num_reusable_tokens)
        if request.num_computed_tokens < num_cached:  # the last token would overwrite cached KV
            self.kv.free(request)
            request.num_computed_tokens = 0
        else:
            self.kv.cache_blocks(request, request.num_computed_tokens)
            reason = self.stop_rules.reason(request) if prefill.token_ids else None
            if reason is not None:
                return [Finished.without_token(request, reason)]
        return [Queued(request)]

    def _remember(self, request_id: str, result: PrefillResult | None) -> None:
        self._early_results[request_id] = result
        self._early_results.move_to_end(request_id)
        while len(self._early_results) > EARLY_RESULTS_KEPT:
            self._early_results.popitem(last=False)


def _samples_of_load(request: Request) -> list[Request]:
    """Return the requests that need the load of `request`.

    These are `request` itself, and the requests of its sample group that wait for the load.
    """
    group = request.group
    if group is None or group.leader is not request:
        return [request]
    return [
        member
        for member in group.members.values()
        if member is request or not (member.started or member.consumes)
    ]
