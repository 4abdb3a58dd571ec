"""Where a sequence goes next: which decode engine, together with whom, and how long it waits for one."""

from __future__ import annotations

import logging
import time

from baton_gateway.errors import APIError, engine_failure, unavailable
from baton_gateway.pool import EnginePool, Member, Wanted
from baton_gateway.sequences import Journey, Placement
from baton_protocol.messages import ErrorCode

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Attempts of one sequence in a row without a token. Then its failure is the answer: it may be what kills engines."""
OVERLOAD_RETRY_S = 0.5
"""A sequence that has begun asks engines without room again after so long."""


class Placer:
    """Picks engines for sequences.

    Args:
        queue_wait_s: how long a new sequence waits while no engine is available.
        resume_wait_s: how long one whose engine was lost waits for another one.
    """

    def __init__(self, pool: EnginePool, *, queue_wait_s: float, resume_wait_s: float) -> None:
        self._pool = pool
        self._queue_wait_s = queue_wait_s
        self._resume_wait_s = resume_wait_s

    async def place(self, journey: Journey, *, with_group: bool) -> Placement:
        """The engine for its next attempt.

        Args:
            with_group: it may go where the other samples of its group go.

        Raises:
            APIError: there is none, or it has failed too often.
        """
        if journey.num_failures >= MAX_FAILURES:
            raise _final(journey)
        group, failure = journey.sequence.group, journey.failure
        if group is None or not with_group or not (failure is None or failure.is_of_engine):
            return await self._choose(journey)
        last = 0 if journey.placement is None else journey.placement.readiness
        async with group.lock:
            placement = group.placements.get(last)
            if (
                placement is None
                or not placement.available
                or not self._wanted(journey).includes(placement.member)
            ):
                placement = group.placements[last] = await self._choose(journey)
            return placement

    async def _choose(self, journey: Journey) -> Placement:
        wanted = self._wanted(journey)
        member = self._pool.pick_decode(wanted)
        if member is None and journey.meets_overload:
            member = await self._wait_for_room(journey, wanted)
        elif member is None:
            member = await self._pool.wait_decode(self._patience_s(journey), wanted)
        if member is None:
            raise _final(journey)
        return Placement(member)

    def _wanted(self, journey: Journey) -> Wanted:
        # Until a token was seen nothing is owed to this version of the model: any decode engine will do.
        config_hash = journey.config_hash if journey.sequence.begun else None
        return Wanted(journey.excluded, config_hash, journey.rank)

    def _patience_s(self, journey: Journey) -> float:
        """How long it is worth to wait for an engine that has not had this sequence."""
        sequence, failure = journey.sequence, journey.failure
        if (
            failure is None
        ):  # before the first engine is there the gateway is not ready, and nobody should send anything
            return self._queue_wait_s if self._pool.decode_seen else 0.0
        if failure.code is None or (sequence.begun and failure.code is ErrorCode.DRAINING):
            return (
                self._resume_wait_s
            )  # what was accepted is not dropped; a successor may be starting
        if failure.code is ErrorCode.DRAINING:
            return self._queue_wait_s
        if failure.code is ErrorCode.OVERLOADED or not self._pool.expects("decode"):
            return 0.0
        return self._resume_wait_s if sequence.begun else self._queue_wait_s

    async def _wait_for_room(self, journey: Journey, wanted: Wanted) -> Member | None:
        """Another engine, or, after a while, any of those that had no room; None once it has waited too long."""
        if time.monotonic() - journey.stalled_since > self._resume_wait_s:
            return None
        member = await self._pool.wait_decode(OVERLOAD_RETRY_S, wanted)
        if member is None:
            journey.excluded.clear()
            member = await self._pool.wait_decode(self._resume_wait_s, self._wanted(journey))
        return member


def _final(journey: Journey) -> APIError:
    """Why it goes no further."""
    failure = journey.failure
    if failure is None:
        if journey.rank is not None:
            return unavailable(
                f"Data-parallel rank {journey.rank} is not ready; retry later.",
                code="no_ready_engine",
            )
        return unavailable("No decode engine is ready; retry later.", code="no_ready_engine")
    logger.error("request %s failed: %s", journey.sequence.request_id, failure)
    if failure.code is None:
        return unavailable(
            f"The engine serving this request was lost, and no other took it over: {failure}"
        )
    return engine_failure(str(failure), failure.code)
