"""Chooses the engines for a sequence's next attempt, or waits until an engine is available."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from baton_gateway.errors import APIError, engine_failure, see_log, unavailable
from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.engine_pool import EnginePool
from baton_gateway.routing.pool_member import PoolMember
from baton_gateway.routing.retry_state import RetryState
from baton_gateway.routing.sequence import Placement, Sequence
from baton_protocol.engine_messages import ErrorCode

logger = logging.getLogger(__name__)

#: Interval in seconds at which a sequence with generated tokens is sent to full engines again.
OVERLOAD_RETRY_S = 0.5


@dataclass(frozen=True)
class Requirements:
    """Conditions that an engine must satisfy to be picked.

    Args:
        excluded: `EngineClient.ready_epoch` of engines that must not be picked. An engine that
            became ready again has a new value and may be picked.
        compatibility_hash: the hash that the engine must have; None if any hash will do.
        data_parallel_rank: the rank that the engine must have; None if any rank will do.
        kv_transport: the KV transport that the engine must use; None if any transport will do.
    """

    excluded: Collection[int] = ()
    compatibility_hash: str | None = None
    data_parallel_rank: int | None = None
    kv_transport: str | None = None

    def accept(self, member: PoolMember) -> bool:
        """Return whether an available member satisfies the conditions."""
        client = member.ready_client
        return (
            client.ready_epoch not in self.excluded
            and self.compatibility_hash in (None, client.init.compatibility_hash)
            and self.kv_transport in (None, client.init.kv_transport)
            and self.data_parallel_rank in (None, member.ready.data_parallel_rank)
        )


class Placer:
    """Picks the least loaded engines that may run a sequence.

    Args:
        prefill_threshold_tokens: prompts with fewer tokens use no prefill engine.
        queue_wait_s: seconds that a new sequence waits while no engine is available.
        resume_wait_s: seconds that a sequence waits for another engine, if its engine was lost or
            tokens were generated.
    """

    def __init__(
        self,
        pool: EnginePool,
        metrics: GatewayMetrics,
        *,
        prefill_threshold_tokens: int,
        queue_wait_s: float,
        resume_wait_s: float,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._prefill_threshold_tokens = prefill_threshold_tokens
        self._queue_wait_s = queue_wait_s
        self._resume_wait_s = resume_wait_s

    async def place(self, state: RetryState) -> tuple[Placement, PoolMember | None]:
        """Choose the engines for the next attempt.

        Returns:
            The decode engine, and the prefill engine or None. Without a prefill engine, the decode
            engine computes the prompt, or reuses the KV blocks of an earlier sample of the prompt.

        Raises:
            APIError: no decode engine is available, or the sequence has failed too often.
        """
        if state.has_failed_too_often:
            raise _final_error(state)
        decode = await self._place_decode(state)
        # Picked last, because prefill engines may come and go during the wait for a decode engine.
        return decode, self._pick_prefill(state.sequence, decode)

    async def _place_decode(self, state: RetryState) -> Placement:
        """Choose the decode engine for the next attempt.

        The samples of a group run on the same engine. After a failure that does not affect the
        whole group, an engine is chosen for the failed sample alone.
        """
        group, failure = state.sequence.group, state.last_failure
        if group is None or (failure is not None and not failure.ends_group):
            return Placement(await self._choose(state))
        lost = 0 if state.last_placement is None else state.last_placement.ready_epoch
        async with group.lock:
            placement = group.placements.get(lost)
            if (
                placement is None
                or not placement.is_available
                or not _requirements(state).accept(placement.member)
            ):
                placement = Placement(await self._choose(state), group.group_id)
                group.placements[lost] = placement
            return placement

    async def _choose(self, state: RetryState) -> PoolMember:
        """Choose the least loaded decode engine that may run the sequence, or wait for one.

        Raises:
            APIError: no engine that may run the sequence was available in time.
        """
        requirements = _requirements(state)
        member = self._least_loaded("decode", requirements)
        if member is None and state.is_waiting_for_capacity:
            member = await self._wait_for_capacity(state, requirements)
        elif member is None:
            member = await self._wait_decode(self._timeout_s(state), requirements)
        if member is None:
            raise _final_error(state)
        return member

    def _pick_prefill(self, sequence: Sequence, decode: Placement) -> PoolMember | None:
        """Pick a prefill engine whose KV blocks `decode` can read.

        Returns:
            The engine. None if the sequence needs no prefill stage, or no such engine is available.
        """
        if (
            decode.has_sample
            or not sequence.can_prefill_remotely
            or len(sequence.prompt_token_ids) < self._prefill_threshold_tokens
        ):
            return None
        init = decode.member.ready_client.init
        requirements = Requirements(
            compatibility_hash=init.compatibility_hash, kv_transport=init.kv_transport
        )
        member = self._least_loaded("prefill", requirements)
        if member is None and self._pool.available("prefill"):
            self._metrics.prefill_fallbacks.labels("no_compatible_engine").inc()
        elif member is None and self._pool.is_expecting("prefill"):
            self._metrics.prefill_fallbacks.labels("no_ready_engine").inc()
        return member

    def _least_loaded(self, role: str, requirements: Requirements) -> PoolMember | None:
        candidates = filter(requirements.accept, self._pool.available(role))
        return min(candidates, key=PoolMember.load, default=None)

    async def _wait_decode(self, timeout_s: float, requirements: Requirements) -> PoolMember | None:
        return await self._pool.wait_for(
            partial(self._least_loaded, "decode", requirements), timeout_s
        )

    def _timeout_s(self, state: RetryState) -> float:
        """Return how many seconds to wait for an engine that has not yet received the sequence.

        | last failure                             | before the first token | after it      |
        | ---------------------------------------- | ---------------------- | ------------- |
        | none                                     | queue_wait_s           | -             |
        | the engine is gone (no code)             | resume_wait_s          | resume_wait_s |
        | DRAINING                                 | queue_wait_s           | resume_wait_s |
        | OVERLOADED                               | 0                      | -             |
        | another code, an engine is expected      | queue_wait_s           | resume_wait_s |
        | another code, no engine is expected      | 0                      | 0             |
        """
        failure = state.last_failure
        if failure is None:
            return self._queue_wait_s
        if failure.code is None:
            return self._resume_wait_s  # an accepted request waits for a replacement
        may_wait = failure.code is ErrorCode.DRAINING or (
            failure.code is not ErrorCode.OVERLOADED and self._pool.is_expecting("decode")
        )
        if not may_wait:
            return 0.0
        return self._resume_wait_s if state.sequence.has_begun else self._queue_wait_s

    async def _wait_for_capacity(
        self, state: RetryState, requirements: Requirements
    ) -> PoolMember | None:
        """Wait for an engine that has not received the sequence yet.

        If no such engine becomes available within OVERLOAD_RETRY_S, wait for any engine.

        Returns:
            The engine, or None. None if no engine was available within resume_wait_s, or if the
            sequence has made no progress for longer than that.
        """
        if time.monotonic() - state.stalled_since > self._resume_wait_s:
            return None
        member = await self._wait_decode(OVERLOAD_RETRY_S, requirements)
        if member is None:
            state.excluded.clear()
            member = await self._wait_decode(self._resume_wait_s, _requirements(state))
        return member


def _requirements(state: RetryState) -> Requirements:
    # Before its first token a sequence is not bound to one version of the model.
    compatibility_hash = state.compatibility_hash if state.sequence.has_begun else None
    return Requirements(state.excluded, compatibility_hash, state.rank)


def _final_error(state: RetryState) -> APIError:
    """Return the error for the client of a sequence that is not retried any more."""
    failure = state.last_failure
    if failure is None:
        if state.rank is not None:
            return unavailable(
                f"Data-parallel rank {state.rank} is not ready; retry later.",
                code="no_ready_engine",
            )
        return unavailable("No decode engine is ready; retry later.", code="no_ready_engine")
    request_id = state.sequence.request_id
    logger.error(
        "request %s failed after %d attempts, and the client gets an error: %s",
        request_id,
        state.num_attempts,
        failure,
    )
    if failure.code is None:
        return unavailable(
            "The engine serving this request did not finish it, and no other took it over. "
            + see_log(request_id)
        )
    return engine_failure(str(failure), failure.code, request_id)
