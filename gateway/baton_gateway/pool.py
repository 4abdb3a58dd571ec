"""The engine pool: one connected client per discovered engine, and who is to get the next request.

A member is connected for as long as discovery names it. It reconnects with backoff to whatever instance listens at its address;
when discovery drops it, it gets nothing new and goes once its requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Collection
from contextlib import aclosing

from baton_engine.protocol.client import EngineClient, EngineDeadError
from baton_engine.protocol.config import EngineEndpoint
from baton_gateway.discovery import Discovery
from baton_gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 600.0
"""A connected engine may load its model this long before the connection is tried anew."""
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0
_LEAVING_POLL_S = 0.1


class Member:
    """One discovered engine; `client` is set while it is connected and accepts requests."""

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self.endpoint = endpoint
        self.client: EngineClient | None = None
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Discovery no longer names it."""
        self._left.set()

    def has_left(self) -> bool:
        return self._left.is_set()

    @property
    def available(self) -> bool:
        """Takes new requests, as far as is known here."""
        client = self.client
        if client is None or self.has_left() or self.endpoint.draining or client.dead_reason is not None:
            return False
        return not (client.status is not None and client.status.draining)

    @property
    def ready_client(self) -> EngineClient:
        """Only of an available member."""
        assert self.client is not None
        return self.client

    @property
    def max_model_len(self) -> int:
        ready = self.ready_client.ready
        assert ready is not None  # `client` is set after READY
        return ready.max_model_len

    def load(self) -> tuple[float, float, float]:
        """Sort key. Our own requests are known exactly; heartbeats add those of other gateways, a second late."""
        client = self.ready_client
        status = client.status
        if status is None:
            return client.num_unfinished, 0.0, random.random()
        reported = status.num_running + status.num_waiting
        return max(client.num_unfinished, reported), status.kv_cache_usage, random.random()


class EnginePool:
    """Keeps members as discovery says. `run` does the work; the other methods are for the same event loop."""

    def __init__(self, discovery: Discovery, metrics: GatewayMetrics, *, max_backoff_s: float = MAX_BACKOFF_S) -> None:
        self._discovery = discovery
        self._metrics = metrics
        self._max_backoff_s = max_backoff_s
        self._client_id = f"gateway-{uuid.uuid4().hex[:8]}"
        self._members: dict[tuple[str, str, int], Member] = {}
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self.decode_seen = False
        """A decode engine has been ready since the start."""
        for role in ("prefill", "decode"):
            metrics.engines_ready.labels(role).set_function(self._count(role))

    async def run(self) -> None:
        """Follows discovery until cancelled, then closes every connection."""
        try:
            async with aclosing(self._discovery.watch()) as sets:
                async for endpoints in sets:
                    self._apply(endpoints)
                    await self._notify()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def available(self, role: str) -> list[Member]:
        """Members of a role that take new requests."""
        return [member for member in self._members.values() if member.endpoint.role == role and member.available]

    def pick_decode(self, *, excluded: Collection[str] = (), config_hash: str | None = None) -> Member | None:
        """The least loaded decode engine.

        Args:
            excluded: instance ids not to use.
            config_hash: only engines that can continue a request of one with this hash.
        """
        return self._least_loaded("decode", excluded, config_hash)

    def pick_prefill(self, decode: Member, *, excluded: Collection[str] = ()) -> Member | None:
        """The least loaded prefill engine whose KV blocks `decode` may read."""
        return self._least_loaded("prefill", excluded, decode.ready_client.init.config_hash)

    async def wait_decode(
        self, timeout_s: float, *, excluded: Collection[str] = (), config_hash: str | None = None
    ) -> Member | None:
        """As `pick_decode`, but waits for one to come; None after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while True:
                    member = self.pick_decode(excluded=excluded, config_hash=config_hash)
                    if member is not None:
                        return member
                    await self._changed.wait()
        except TimeoutError:
            return None

    @property
    def max_model_len(self) -> int | None:
        """Tokens that every available decode engine can hold; None while there is none."""
        return min((member.max_model_len for member in self.available("decode")), default=None)

    def _least_loaded(self, role: str, excluded: Collection[str], config_hash: str | None) -> Member | None:
        candidates = [
            member
            for member in self.available(role)
            if member.ready_client.instance_id not in excluded
            and config_hash in (None, member.ready_client.init.config_hash)
        ]
        return min(candidates, key=Member.load, default=None)

    def _count(self, role: str) -> Callable[[], float]:
        return lambda: float(len(self.available(role)))

    def _apply(self, endpoints: list[EngineEndpoint]) -> None:
        wanted = {(e.name, e.host, e.engine_port): e for e in endpoints}
        for key in self._members.keys() - wanted.keys():
            member = self._members.pop(key)
            member.leave()
            logger.info("engine %s left discovery", member.endpoint.name)
        for key, endpoint in wanted.items():
            known = self._members.get(key)
            if known is not None:
                known.endpoint = endpoint
                continue
            member = self._members[key] = Member(endpoint)
            logger.info("engine %s (%s) discovered at %s", endpoint.name, endpoint.role, endpoint.host)
            task = asyncio.create_task(self._maintain(member), name=f"pool {endpoint.name}")
            self._tasks[member] = task
            task.add_done_callback(lambda _, member=member: self._tasks.pop(member, None))  # type: ignore[misc]

    async def _maintain(self, member: Member) -> None:
        """Keeps `member` connected until it has left and its requests have ended."""
        backoff_s = MIN_BACKOFF_S
        last_failure = ""
        while not member.has_left():
            endpoint = member.endpoint
            client = EngineClient(endpoint.host, endpoint.engine_port, client_id=self._client_id)
            try:
                await client.connect(CONNECT_TIMEOUT_S)
                await self._wait_ready(member, client)
                if member.has_left():
                    return
                backoff_s, last_failure = MIN_BACKOFF_S, ""
                member.client = client
                self.decode_seen |= endpoint.role == "decode"
                self._check_pairs(member)
                await self._notify()
                logger.info("engine %s is ready: instance %s", endpoint.name, client.instance_id)
                await self._until_dead_or_left(member, client)
                if not member.has_left():
                    logger.warning("engine %s lost, reconnecting: %s", endpoint.name, client.dead_reason)
            except (EngineDeadError, TimeoutError, OSError) as error:
                if str(error) != last_failure:
                    last_failure = str(error)
                    logger.info("engine %s is not there yet: %s", endpoint.name, error)
            except Exception:  # no file descriptor left, say: nobody else would ever connect to this engine again
                logger.exception("connecting to engine %s failed, trying again", endpoint.name)
            finally:
                member.client = None
                await client.close()
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    async def _wait_ready(self, member: Member, client: EngineClient) -> None:
        """Waits for READY in slices, so that a member that leaves while it loads is let go."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOAD_TIMEOUT_S
        while not member.has_left():
            try:
                await client.wait_ready(timeout_s=1.0)
                return
            except TimeoutError:
                if loop.time() > deadline:
                    raise

    async def _until_dead_or_left(self, member: Member, client: EngineClient) -> None:
        dead = asyncio.create_task(client.wait_dead())
        try:
            while not dead.done() and not (member.has_left() and client.num_unfinished == 0):
                await asyncio.wait([dead], timeout=_LEAVING_POLL_S)
        finally:
            dead.cancel()

    def _check_pairs(self, member: Member) -> None:
        """Engines of different checkpoints, dtypes or layouts are never paired; someone should hear of it."""
        ours = member.ready_client.init.config_hash
        for other in self._members.values():
            if other.client is None or other.endpoint.role == member.endpoint.role:
                continue
            if other.client.init.config_hash != ours:
                self._metrics.pair_mismatches.inc()
                logger.warning(
                    "engines %s and %s have different config hashes (%s, %s) and will not be paired: "
                    "give both the same checkpoint, dtype, quantization and block size; dtype auto depends on the machine, "
                    "so set it where they run on different ones",
                    member.endpoint.name,
                    other.endpoint.name,
                    ours,
                    other.client.init.config_hash,
                )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
