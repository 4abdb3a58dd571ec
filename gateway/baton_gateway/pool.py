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
from dataclasses import dataclass

from baton_gateway.discovery import Discovery
from baton_gateway.metrics import GatewayMetrics
from baton_protocol.client import EngineClient, EngineDeadError, HandshakeFailedError
from baton_protocol.config import EngineEndpoint
from baton_protocol.heartbeat import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S
from baton_protocol.messages import Ready
from baton_protocol.service_key import ServiceKey

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
        if self.client is None or self.has_left() or self.endpoint.draining:
            return False
        return self.client.accepts_requests

    @property
    def ready_client(self) -> EngineClient:
        """Only of an available member."""
        assert self.client is not None
        return self.client

    @property
    def ready(self) -> Ready:
        """What an available member said last of its size and its place in the group."""
        ready = self.ready_client.ready
        assert ready is not None  # `client` is set after READY
        return ready

    def load(self) -> tuple[float, float, float]:
        """Sort key. Our own requests are known exactly; heartbeats add those of other gateways, an interval late."""
        client = self.ready_client
        usage = 0.0 if client.status is None else client.status.kv_cache_usage
        return client.num_requests, usage, random.random()


@dataclass(frozen=True)
class Wanted:
    """What an engine must be to be picked."""

    excluded: Collection[int] = ()
    """Not these, by `EngineClient.readiness`: an engine that has become ready again since is another one."""
    config_hash: str | None = None
    """One that can continue a request of an engine with this hash."""
    data_parallel_rank: int | None = None

    def includes(self, member: Member) -> bool:
        """Whether an available member will do."""
        client = member.ready_client
        return (
            client.readiness not in self.excluded
            and self.config_hash in (None, client.init.config_hash)
            and self.data_parallel_rank in (None, member.ready.data_parallel_rank)
        )


ANY = Wanted()


class EnginePool:
    """Keeps members as discovery says. `run` does the work; the other methods are for the same event loop."""

    def __init__(
        self,
        discovery: Discovery,
        metrics: GatewayMetrics,
        *,
        service_key: ServiceKey | None = None,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        max_backoff_s: float = MAX_BACKOFF_S,
    ) -> None:
        self._discovery = discovery
        self._metrics = metrics
        self._service_key = service_key
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._max_backoff_s = max_backoff_s
        self._client_id = f"gateway-{uuid.uuid4().hex[:8]}"
        self._members: dict[tuple[str, str, int], Member] = {}
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        """Set, and replaced by another, whenever a member may be available that was not."""
        self._max_model_len: int | None = None
        self._data_parallel_size = 1
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
                    self._notify()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def available(self, role: str) -> list[Member]:
        """Members of a role that take new requests."""
        return [
            member
            for member in self._members.values()
            if member.endpoint.role == role and member.available
        ]

    def pick_decode(self, wanted: Wanted = ANY) -> Member | None:
        """The least loaded decode engine."""
        return self._least_loaded("decode", wanted)

    def pick_prefill(self, decode: Member) -> Member | None:
        """The least loaded prefill engine whose KV blocks `decode` may read."""
        return self._least_loaded(
            "prefill", Wanted(config_hash=decode.ready_client.init.config_hash)
        )

    async def wait_decode(self, timeout_s: float, wanted: Wanted = ANY) -> Member | None:
        """As `pick_decode`, but waits for one to come; None after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    changed = self._changed
                    member = self.pick_decode(wanted)
                    if member is not None:
                        return member
                    await changed.wait()
        except TimeoutError:
            return None

    def expects(self, role: str) -> bool:
        """Whether some engine of this role is known that is not available now: it may be soon."""
        return any(
            member.endpoint.role == role and not member.available
            for member in self._members.values()
        )

    @property
    def max_model_len(self) -> int | None:
        """Tokens that every available decode engine can hold; while there is none, as it was; None before the first."""
        self._look()
        return self._max_model_len

    @property
    def data_parallel_size(self) -> int:
        """Ranks of the decode group, as its available members say; while there is none, as it was."""
        self._look()
        return self._data_parallel_size

    def _look(self) -> None:
        """What decode engines say of themselves is remembered for the time when all are away."""
        members = self.available("decode")
        if members:
            self._max_model_len = min(member.ready.max_model_len for member in members)
            self._data_parallel_size = max(member.ready.data_parallel_size for member in members)

    def _least_loaded(self, role: str, wanted: Wanted) -> Member | None:
        candidates = [member for member in self.available(role) if wanted.includes(member)]
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
            logger.info(
                "engine %s (%s) discovered at %s", endpoint.name, endpoint.role, endpoint.host
            )
            task = asyncio.create_task(self._maintain(member), name=f"pool {endpoint.name}")
            self._tasks[member] = task
            task.add_done_callback(lambda _, member=member: self._tasks.pop(member, None))  # type: ignore[misc]

    async def _maintain(self, member: Member) -> None:
        """Keeps `member` connected until it has left and its requests have ended."""
        backoff_s = MIN_BACKOFF_S
        last_failure, refusals = "", 0
        while not member.has_left():
            endpoint = member.endpoint
            client = EngineClient(
                endpoint.host,
                endpoint.engine_port,
                client_id=self._client_id,
                service_key=self._service_key,
                heartbeat_interval_s=self._heartbeat_interval_s,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
                on_available=self._notify,
            )
            try:
                await client.connect(CONNECT_TIMEOUT_S)
                await self._wait_ready(member, client)
                if member.has_left():
                    return
                backoff_s, last_failure, refusals = MIN_BACKOFF_S, "", 0
                member.client = client
                self.decode_seen |= endpoint.role == "decode"
                self._check_pairs(member)
                self._notify()
                logger.info("engine %s is ready: instance %s", endpoint.name, client.instance_id)
                await self._until_dead_or_left(member, client)
                if not member.has_left():
                    logger.warning(
                        "engine %s lost, reconnecting: %s", endpoint.name, client.dead_reason
                    )
            except (
                HandshakeFailedError
            ) as error:  # its words vary with what of the refusal is seen first
                last_failure, refusals = "", refusals + 1
                if refusals == 1:
                    logger.info("engine %s is not there yet: %s", endpoint.name, error)
                elif refusals == 2:
                    logger.warning(
                        "engine %s is there, but of no use to this gateway: %s",
                        endpoint.name,
                        error,
                    )
            except (EngineDeadError, TimeoutError, OSError) as error:
                refusals = 0
                if str(error) != last_failure:
                    last_failure = str(error)
                    logger.info("engine %s is not there yet: %s", endpoint.name, error)
            except (
                Exception
            ):  # no file descriptor left, say: nobody else would ever connect to this engine again
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

    def _notify(self) -> None:
        self._look()
        self._changed.set()
        self._changed = asyncio.Event()
