"""A prefill engine and decode engines as processes, a proxy of their side channel, and a client.

For the chaos tests of the hand-off.

The client handles one request as the gateway does, but never retries or aborts. Each engine must
therefore release the state of a failed request by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton_kv_transfer import side_channel
from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError
from baton_protocol.engine_messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    KV_PORT,
    KVRole,
    KVTransferConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams
from support.kv_transfer.side_channel_proxy import Hook, Passing, SideChannelProxy, Verdict
from support.parity import assert_greedy, reference_model
from support.pods import KV_TRANSPORT, Network, Pod, Pods
from support.waiting import eventually

LEASE_S = 1.5
LOAD_TIMEOUT_S = 1.5
#: Time for which the client waits for the first token before it reports a failed prefill.
PREFILL_S = 2.5
#: Deadline of a request: the sum of all timeouts in sequence, on a busy machine.
DEADLINE_S = 25.0
#: Time after which leases, drains and fences have ended.
CLEAN_S = 20.0
PROMPT_TOKENS = 640
#: Small chunks, so that tests can act in the middle of a transfer.
CHUNK_TOKENS = 16
MAX_TOKENS = 12
VOCAB = 500
_numbers = itertools.count()


@dataclass
class Answer:
    token_ids: list[int]
    error: str = ""
    error_code: ErrorCode | None = None  # None with an error: the connection was lost
    prefill_error: str = ""  # the error of PREFILL_RESULT


def new_prompt() -> list[int]:
    """Return a new prompt, which no prefix cache contains."""
    rng = random.Random(f"chaos-{next(_numbers)}")
    return [rng.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)]


class PairClients:
    """The client of the prefill engine and the client of a decode engine."""

    def __init__(
        self, prefill: EngineClient, decode: EngineClient, kv_address: tuple[str, int]
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._kv_address = kv_address

    @property
    def prefill_instance(self) -> str:
        return self._prefill.instance_id

    async def hand_off(
        self, prompt: list[int], *, transfer_id: str = "", producer: str = ""
    ) -> Answer:
        """Send one request to both engines, and return the response.

        Args:
            prompt: token ids of the prompt.
            transfer_id: transfer id of the request; empty for a new id.
            producer: instance id from which the decode engine loads; empty for the prefill engine.

        Raises:
            TimeoutError: the request has not ended within DEADLINE_S.
        """
        transfer_id, request_id = transfer_id or uuid.uuid4().hex, uuid.uuid4().hex
        host, port = self._kv_address
        consume = KVTransferParams(
            KVSide.CONSUME, transfer_id, producer or self._prefill.instance_id, host, port
        )
        produce = KVTransferParams(KVSide.PRODUCE, transfer_id, self._decode.instance_id)
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        answer = Answer([])
        try:
            async with asyncio.timeout(DEADLINE_S):
                rest = self._decode.add(
                    EngineCoreRequest(request_id, prompt, params, kv_transfer=consume)
                )
                result = PrefillResult(request_id)
                try:
                    async with asyncio.timeout(PREFILL_S):
                        rank_transfer = self._prefill.add(
                            EngineCoreRequest(request_id, prompt, one, kv_transfer=produce)
                        )
                        first = await anext(rank_transfer)
                        assert not first.error, first.error
                        answer.token_ids = result.token_ids = first.new_token_ids
                except (TimeoutError, EngineDeadError) as error:
                    result.error = answer.prefill_error = (
                        str(error) or f"no first token within {PREFILL_S} s"
                    )
                self._decode.prefill_result(result)
                async for output in rest:
                    _take(answer, output)
        except EngineDeadError as error:
            answer.error = str(error)
        return answer

    async def alone(self, *, on_prefill: bool) -> None:
        """Check that one engine completes a new request by itself."""
        client = self._prefill if on_prefill else self._decode
        answer = Answer([])
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        async with asyncio.timeout(DEADLINE_S):
            async for output in client.add(
                EngineCoreRequest(uuid.uuid4().hex, new_prompt(), params)
            ):
                _take(answer, output)
        assert len(answer.token_ids) == 4, answer


def _take(answer: Answer, output: EngineCoreOutput) -> None:
    assert output.token_offset == len(answer.token_ids) or not output.new_token_ids, (
        answer,
        output,
    )
    answer.token_ids = answer.token_ids + output.new_token_ids
    if output.error:
        answer.error, answer.error_code = output.error, output.error_code


@dataclass
class Pair:
    """The engines, the side-channel proxy and the reference model of one test module."""

    prefill: Pod
    decoders: dict[str, Pod]
    proxy: SideChannelProxy
    reference: torch.nn.Module

    @contextlib.asynccontextmanager
    async def clients(self, mode: str) -> AsyncIterator[PairClients]:
        async with contextlib.AsyncExitStack() as stack:
            ready: list[EngineClient] = []
            for pod in (self.prefill, self.decoders[mode]):
                client = EngineClient(
                    pod.address, ENGINE_PORT, client_id="chaos", heartbeat_timeout_s=60.0
                )
                await stack.enter_async_context(client)
                await client.connect(10)
                await client.wait_ready(10)
                ready.append(client)
            yield PairClients(*ready, self.proxy.address)

    @contextlib.contextmanager
    def middle(self, hook: Hook) -> Iterator[SideChannelProxy]:
        """Run `hook` in the proxy during the block. All connections are closed first."""
        self.proxy.reset()
        self.proxy.hook = hook
        try:
            yield self.proxy
        finally:
            self.proxy.hook = lambda passing: Verdict.PASS
            self.proxy.release()
            failure, self.proxy.failure = self.proxy.failure, None
            if failure is not None:
                raise failure

    def assert_right(self, prompt: list[int], answer: Answer, what: str) -> None:
        """Check that the response has no error and the tokens of the reference model."""
        assert not answer.error, f"{what}: {answer}"
        assert len(answer.token_ids) == MAX_TOKENS, f"{what}: {answer}"
        assert_greedy(self.reference, [prompt], [answer.token_ids], what)

    async def assert_clean(self, *pods: Pod) -> None:
        """Wait until the pods hold no state of any request. Fail if a pod has died."""

        def clean(pod: Pod) -> bool:
            assert pod.process.poll() is None, f"{pod.name} died:\n{pod.tail()}"
            wanted = {
                "baton:num_transfers_held": 0,
                "baton:kv_cache_usage_perc": 0,
                "baton:num_requests_running": 0,
                "baton:num_requests_waiting": 0,
                "baton:kv_transfer_queued_bytes": 0,
                "baton:kv_transfer_inflight_bytes": 0,
                "baton:kv_transfer_up": 1,
            }
            left = {name: value for name in wanted if (value := pod.metric(name)) != wanted[name]}
            assert not left, f"{pod.name}: {left}\n{pod.tail()}"
            return True

        for pod in pods:
            await asyncio.to_thread(
                eventually, lambda pod=pod: clean(pod), timeout_s=CLEAN_S, what=f"{pod.name} clean"
            )

    async def assert_works(self, mode: str) -> None:
        """Check that a request without faults loads its KV and returns the right tokens."""
        decode = self.decoders[mode]
        prompt, before = new_prompt(), decode.metric("baton:prompt_tokens_remote_total")
        async with self.clients(mode) as clients:
            answer = await clients.hand_off(prompt)
        self.assert_right(prompt, answer, "afterwards")
        moved = decode.metric("baton:prompt_tokens_remote_total") - before
        assert moved == PROMPT_TOKENS, (
            f"{moved} tokens were loaded, prefill error {answer.prefill_error!r}:\n"
            f"{self.prefill.tail()}\n{decode.tail()}"
        )
        await self.assert_clean(self.prefill, decode)

    async def restart(self, pod: Pod) -> None:
        """Restart a dead pod at its address."""
        pod.process.wait(10)
        pod.restart()
        await asyncio.to_thread(pod.wait_ready, ENGINE_HTTP_PORT)


def start_pair(
    group: Pods,
    checkpoint: Path,
    decoders: dict[str, dict[str, Any]],
    *,
    networks: Sequence[Network] = (),
    proxy_host: str = "",
) -> Pair:
    """Start the engines and the proxy.

    Args:
        group: starts the processes.
        checkpoint: the checkpoint of all engines.
        decoders: name of each decode engine -> options of the engine's KVTransferConfig.
        networks: networks of the prefill engine and each decode engine; empty for the test's own.
        proxy_host: address of the proxy; empty for the prefill engine's address.
    """
    common: dict[str, Any] = {
        "transport": KV_TRANSPORT,
        "lease_s": LEASE_S,
        "load_timeout_s": LOAD_TIMEOUT_S,
    }
    places: Iterator[Network | None] = iter(networks) if networks else itertools.repeat(None)
    prefill = group.engine(
        "prefill",
        checkpoint,
        scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK_TOKENS),
        kv_transfer=KVTransferConfig(role=KVRole.PRODUCER, **common),
        network=next(places),
    )
    started = {
        name: group.engine(
            name,
            checkpoint,
            kv_transfer=KVTransferConfig(role=KVRole.CONSUMER, **common, **options),
            network=next(places),
        )
        for name, options in decoders.items()
    }
    for pod in (prefill, *started.values()):
        pod.wait_ready(ENGINE_HTTP_PORT)
    proxy = SideChannelProxy(proxy_host or prefill.address, (prefill.address, KV_PORT))
    return Pair(prefill, started, proxy, reference_model(checkpoint))


# Hooks of the proxy


def is_first_publish(passing: Passing) -> bool:
    return isinstance(passing.message, side_channel.Publish) and not passing.message.last


def is_message(kind: type[Any]) -> Callable[[Passing], bool]:
    return lambda passing: isinstance(passing.message, kind)


@dataclass
class At:
    """A hook of the proxy that calls `act` at the first message that `matches` accepts."""

    matches: Callable[[Passing], bool]
    act: Callable[[], None]
    verdict: Verdict = Verdict.PASS  # for every message that matches
    reached_at: float = 0.0
    passing: list[Passing] = field(default_factory=list)

    def __call__(self, passing: Passing) -> Verdict:
        if not self.matches(passing):
            return Verdict.PASS
        self.passing.append(passing)
        if not self.reached_at:
            self.act()
            self.reached_at = time.monotonic()
        return self.verdict

    async def reached(self, what: str) -> None:
        await asyncio.to_thread(
            eventually, lambda: self.reached_at, timeout_s=10, what=what, every_s=0.01
        )

    async def sleep_until_after(self, seconds: float) -> None:
        """Sleep until `seconds` after `reached_at`."""
        await asyncio.sleep(max(0.0, self.reached_at + seconds - time.monotonic()))


class AtPush(At):
    """A hook for push mode that calls `act` once a quarter of the prompt is computed.

    The hook polls a metric, because no message is sent while the producer writes blocks.
    """

    def __init__(self, prefill: Pod, act: Callable[[], None]) -> None:
        super().__init__(is_message(side_channel.Subscribe), act)
        self._prefill = prefill
        self._enough = self._computed() + PROMPT_TOKENS / 4
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __call__(self, passing: Passing) -> Verdict:
        if self.matches(passing) and not self._watcher.ident:
            self._watcher.start()
        return Verdict.PASS

    def _watch(self) -> None:
        eventually(
            lambda: self._computed() >= self._enough,
            timeout_s=10,
            what="a part of the prompt",
            every_s=0.001,
        )
        self.act()
        self.reached_at = time.monotonic()

    def _computed(self) -> float:
        return self._prefill.metric("baton:prompt_tokens_computed_total")


def kill(pod: Pod) -> None:
    os.kill(pod.process.pid, signal.SIGKILL)


def freeze(pod: Pod) -> None:
    os.kill(pod.process.pid, signal.SIGSTOP)


def thaw(pod: Pod) -> None:
    os.kill(pod.process.pid, signal.SIGCONT)


# Memory of another process


def read_memory(pod: Pod, address: int, length: int) -> bytes:
    with open(f"/proc/{pod.process.pid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), length, address)


def write_memory(pod: Pod, address: int, data: bytes) -> None:
    with open(f"/proc/{pod.process.pid}/mem", "r+b", buffering=0) as memory:
        assert os.pwrite(memory.fileno(), data, address) == len(data)


def flip_bit(pod: Pod, address: int) -> None:
    """Flip one bit of the byte at `address` in the pod's memory. A second call flips it back."""
    (byte,) = read_memory(pod, address, 1)
    write_memory(pod, address, bytes([byte ^ 0x40]))
