"""The engine pool: a connection to every discovered engine.

The pool keeps a connection while discovery lists the engine. If the connection is lost, the pool
connects again to the same address, with backoff. An engine that discovery no longer lists gets no
new requests, and is disconnected when its last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from baton_gateway.metrics import GatewayMetrics
from baton_gateway.routing.discovery import ROLES, Discovery
from baton_gateway.routing.pool_member import PoolMember
from baton_protocol.engine_client.engine_client import (
    EngineClient,
    EngineDeadError,
    HandshakeFailedError,
)
from baton_protocol.engine_messages import Init, Ready
from baton_protocol.options.config import EngineEndpoint
from baton_protocol.pooling_params import PairFormat, Task
from baton_protocol.service_key import ServiceKey

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
#: A connected engine may load its model for this long before the pool reconnects.
LOAD_TIMEOUT_S = 600.0
#: Shortest and longest pause before the next attempt to connect.
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0
_POLL_S = 0.1
#: Requests stay on a stalled engine for this long if no other engine can continue them. After that
#: they wait for another engine, as if their engine were lost.
MAX_STALL_S = 600.0

_Picked = TypeVar("_Picked")


class EnginePool:
    """All discovered engines, and a connection to each.

    Args:
        discovery: yields the engines.
        metrics: the gateway's metrics.
        service_key: encrypts the connections to engines; None if they are not encrypted.
        heartbeat_interval_s: interval in seconds at which each engine receives a PING.
        heartbeat_timeout_s: an engine that sends nothing for this many seconds counts as dead.
        stall_timeout_s: requests that make no progress for this many seconds move to another
            engine.
    """

    def __init__(
        self,
        discovery: Discovery,
        metrics: GatewayMetrics,
        *,
        service_key: ServiceKey | None,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._discovery = discovery
        self._metrics = metrics
        self._service_key = service_key
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._client_id = f"gateway-{uuid.uuid4().hex[:8]}"
        self._members: dict[tuple[str, str, int], PoolMember] = {}
        self._tasks: dict[PoolMember, asyncio.Task[None]] = {}
        #: Set and replaced each time a member may have become available.
        self._changed = asyncio.Event()
        #: The READY messages of the decode engines that are, or most recently were, available.
        self._decode_ready: list[Ready] = []
        for role in ROLES:
            metrics.engines_ready.labels(role).set_function(self._counter(role))

    async def run(self) -> None:
        """Connect to all engines that discovery yields. When cancelled, close every connection."""
        try:
            async with aclosing(self._discovery.watch()) as sets:
                async for endpoints in sets:
                    self._update_members(endpoints)
                    self._notify()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def available(self, role: str) -> list[PoolMember]:
        """Return the members of `role` that accept new requests."""
        return [
            member
            for member in self._members.values()
            if member.endpoint.role == role and member.is_available
        ]

    @property
    def is_scaled_to_zero(self) -> bool:
        """Whether the service is scaled to zero by hand, so that no decode engine will start."""
        return self._discovery.is_scaled_to_zero

    async def wait_for(
        self, pick: Callable[[], _Picked | None], timeout_s: float
    ) -> _Picked | None:
        """Call `pick` now, and again each time an engine may have become available.

        Returns:
            The first result that is not None; None if there is none within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    changed = self._changed
                    if (picked := pick()) is not None:
                        return picked
                    await changed.wait()
        except TimeoutError:
            return None

    def is_expecting(self, role: str) -> bool:
        """Return whether discovery lists an engine of `role` that is not available now."""
        return any(
            member.endpoint.role == role and not member.is_available
            for member in self._members.values()
        )

    @property
    def has_seen_decode(self) -> bool:
        """Whether a decode engine has been available since the gateway started."""
        return self.max_model_len is not None

    @property
    def max_model_len(self) -> int | None:
        """Limit on tokens per request: the smallest limit of the available decode engines.

        While no decode engine is available, the value does not change. None until a decode engine
        has been available.
        """
        return min((ready.max_model_len for ready in self._decode_engines()), default=None)

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks of the decode engines.

        While no decode engine is available, the value does not change.
        """
        return max((ready.data_parallel_size for ready in self._decode_engines()), default=1)

    @property
    def task(self) -> Task:
        """The task of the decode engines, such as generating text or embedding.

        While no decode engine is available, the value does not change.
        """
        return next((ready.task for ready in self._decode_engines()), Task.GENERATE)

    @property
    def pair_format(self) -> PairFormat | None:
        """How two texts are joined to one prompt. None if the model takes no pairs of texts."""
        return next((ready.pair_format for ready in self._decode_engines()), None)

    def _decode_engines(self) -> list[Ready]:
        """Return the READY message of each available decode engine.

        If none is available, return the messages of the engines that were available last.
        """
        if members := self.available("decode"):
            self._decode_ready = [member.ready for member in members]
        return self._decode_ready

    def _counter(self, role: str) -> Callable[[], float]:
        return lambda: float(len(self.available(role)))

    def _update_members(self, endpoints: list[EngineEndpoint]) -> None:
        current = {(e.name, e.host, e.engine_port): e for e in endpoints}
        for key in self._members.keys() - current.keys():
            member = self._members.pop(key)
            member.leave()
            logger.info(
                "engine %s is no longer discovered, so it gets no new requests",
                member.endpoint.name,
            )
        for key, endpoint in current.items():
            known = self._members.get(key)
            if known is not None:
                known.endpoint = endpoint
                continue
            member = self._members[key] = PoolMember(endpoint)
            logger.info(
                "engine %s (%s) discovered at %s", endpoint.name, endpoint.role, endpoint.host
            )
            task = asyncio.create_task(self._maintain(member), name=f"pool {endpoint.name}")
            self._tasks[member] = task
            task.add_done_callback(lambda _, member=member: self._tasks.pop(member, None))  # type: ignore[misc]

    async def _maintain(self, member: PoolMember) -> None:
        """Keep `member` connected until it is gone from discovery and its requests have ended."""
        backoff_s = MIN_BACKOFF_S
        last_failure, num_refusals = "", 0
        while not member.has_left():
            endpoint = member.endpoint
            client = self._new_client(endpoint)
            try:
                await client.connect(CONNECT_TIMEOUT_S)
                await self._wait_ready(member, client)
                if member.has_left():
                    return
                backoff_s, last_failure, num_refusals = MIN_BACKOFF_S, "", 0
                member.client = client
                self._report_mismatched_pairs(member)
                self._notify()
                logger.info("engine %s is ready: instance %s", endpoint.name, client.instance_id)
                await self._wait_lost_or_left(member, client)
                if not member.has_left():
                    logger.warning(
                        "engine %s is lost, and its requests move to other engines; "
                        "reconnecting: %s",
                        endpoint.name,
                        client.dead_reason,
                    )
            except HandshakeFailedError as error:
                # Refusals are counted, not compared: their text depends on the part of the refusal
                # that arrives first.
                last_failure, num_refusals = "", num_refusals + 1
                if num_refusals == 1:
                    logger.info("engine %s is not ready, retrying: %s", endpoint.name, error)
                elif num_refusals == 2:
                    logger.warning(
                        "the handshake with engine %s failed twice, usually because the service "
                        "keys differ; retrying: %s",
                        endpoint.name,
                        error,
                    )
            except (EngineDeadError, TimeoutError, OSError) as error:
                num_refusals = 0
                if str(error) != last_failure:
                    last_failure = str(error)
                    logger.info("engine %s is not ready, retrying: %s", endpoint.name, error)
            except Exception:
                # For example, no file descriptor is free. Without a retry, the engine would stay
                # lost.
                logger.exception("connecting to engine %s failed, retrying", endpoint.name)
            finally:
                member.client = None
                await client.close()
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _new_client(self, endpoint: EngineEndpoint) -> EngineClient:
        return EngineClient(
            endpoint.host,
            endpoint.engine_port,
            client_id=self._client_id,
            service_key=self._service_key,
            heartbeat_interval_s=self._heartbeat_interval_s,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            on_available=self._notify,
        )

    async def _wait_ready(self, member: PoolMember, client: EngineClient) -> None:
        """Wait until the engine sends READY, or until the member is gone from discovery.

        Raises:
            TimeoutError: the engine has not sent READY within LOAD_TIMEOUT_S.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOAD_TIMEOUT_S
        while not member.has_left():
            try:
                await client.wait_ready(timeout_s=1.0)
                return
            except TimeoutError:
                if loop.time() > deadline:
                    raise

    async def _wait_lost_or_left(self, member: PoolMember, client: EngineClient) -> None:
        """Wait until the engine is dead, or is gone from discovery and its requests have ended.

        During the wait, requests move to other engines if `_why_move_requests` gives a reason.
        """
        clock = asyncio.get_running_loop().time
        moved_at = -math.inf
        dead = asyncio.create_task(client.wait_dead())
        try:
            while not dead.done() and not (member.has_left() and client.num_unfinished == 0):
                await asyncio.wait([dead], timeout=_POLL_S)
                if clock() - moved_at < self._stall_timeout_s:
                    continue  # requests sent after the last move have time to make progress
                if (reason := self._why_move_requests(member, client)) is not None:
                    moved_at = clock()
                    name, num_requests = member.endpoint.name, client.num_unfinished
                    logger.warning(
                        "engine %s: moving %d requests to other engines: %s",
                        name,
                        num_requests,
                        reason,
                    )
                    client.abandon_requests(reason)
        finally:
            dead.cancel()

    def _why_move_requests(self, member: PoolMember, client: EngineClient) -> str | None:
        """Return why the requests of a live engine should move to other engines; None: they stay.

        Requests move if the engine sleeps, or if they make no progress for longer than a limit. The
        limit is the stall timeout or twice the engine's longest step, whichever is longer. If no
        other decode engine can continue the requests, the limit is at least MAX_STALL_S, even if
        the engine sleeps. Decode engines also continue the requests of prefill engines.
        """
        status = client.status
        if status is None or not client.num_unfinished or client.dead_reason is not None:
            return None
        timeout_s = max(self._stall_timeout_s, 2 * status.longest_step_s)
        if not (status.asleep or status.stalled_s > timeout_s):
            return None
        compatibility_hash = client.init.compatibility_hash
        can_move = any(
            other is not member
            and not other.is_slow
            and other.ready_client.init.compatibility_hash == compatibility_hash
            for other in self.available("decode")
        )
        if not can_move and status.stalled_s <= max(MAX_STALL_S, timeout_s):
            return None
        if status.asleep:
            return "the engine sleeps"
        return f"the engine's requests have made no progress for {status.stalled_s:.0f} s"

    def _report_mismatched_pairs(self, member: PoolMember) -> None:
        """Log and count engines of the other role that cannot exchange KV blocks with `member`."""
        ours = _kv_properties(member.ready_client.init)
        for other in self._members.values():
            if other.client is None or other.endpoint.role == member.endpoint.role:
                continue
            theirs = _kv_properties(other.client.init)
            if theirs != ours:
                self._metrics.pair_mismatches.inc()
                logger.warning(
                    "engines %s and %s cannot exchange KV blocks, because they differ in "
                    "compatibility hash or KV transport: %s and %s. Give both the same checkpoint, "
                    "dtype, quantization and transport. If their machines differ, set dtype, "
                    "because dtype auto depends on the machine",
                    member.endpoint.name,
                    other.endpoint.name,
                    ours,
                    theirs,
                )

    def _notify(self) -> None:
        """Wake the callers of `wait_for`, because an engine may have become available."""
        self._decode_engines()  # records READY, even of an engine that is lost before a request
        self._changed.set()
        self._changed = asyncio.Event()


def _kv_properties(init: Init) -> tuple[str, str]:
    """Return the compatibility hash and the KV transport, which must be equal in paired engines."""
    return init.compatibility_hash, init.kv_transport
