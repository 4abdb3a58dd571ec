"""Send load to a gateway during the body of a test, and check all responses.

For the integration, chaos and end-to-end tests of services, and for benchmarks.

`Load` keeps a constant number of streams open. Their requests are the same in every run.
`fresh_connections` sends short requests, each over a new connection.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import torch

from support.parity import assert_right_tokens


@dataclass
class Stream:
    """One request and its response."""

    number: int
    prompt: list[int]
    max_tokens: int
    seed: int | None  # None: greedy
    token_ids: list[int] = field(default_factory=list)
    #: `time.monotonic()` of the request and of each chunk.
    times: list[float] = field(default_factory=list)
    error: str = ""
    finished: bool = False

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two chunks."""
        return max(
            (after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)),
            default=0.0,
        )


class Load:
    """Keeps `width` streams open until `stop()`. Open streams then run to their end.

    Stream k is the same request in every run.
    """

    def __init__(
        self,
        url: str,
        *,
        width: int,
        vocab_size: int,
        max_tokens: tuple[int, int] = (40, 160),
    ) -> None:
        """Create a load without streams.

        Args:
            url: URL of the gateway.
            max_tokens: smallest and greatest number of tokens of a stream. EOS is ignored.
        """
        self._url = url
        self._width = width
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._next = 0
        self._stopping = asyncio.Event()
        #: All streams in the order in which they were started.
        self.streams: list[Stream] = []

    def make(self, number: int) -> Stream:
        rng = random.Random(number)
        prompt = [rng.randrange(3, self._vocab_size) for _ in range(rng.randint(4, 60))]
        return Stream(
            number, prompt, rng.randint(*self._max_tokens), rng.choice([None, rng.randrange(2**31)])
        )

    async def run(self) -> None:
        """Run streams until `stop()` has been called and all streams have ended."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._keep_one_open(session) for _ in range(self._width)))

    def stop(self) -> None:
        self._stopping.set()

    async def replay(self, numbers: list[int]) -> dict[int, Stream]:
        """Run the streams `numbers`, `width` at a time. Return them by number."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        places = asyncio.Semaphore(self._width)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def one(number: int) -> Stream:
                stream = self.make(number)
                async with places:
                    await self._follow(session, stream)
                return stream

            return {stream.number: stream for stream in await asyncio.gather(*map(one, numbers))}

    @property
    def failed(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.error or not stream.finished]

    @property
    def longest_gap_s(self) -> float:
        return max((stream.longest_gap_s for stream in self.streams), default=0.0)

    async def _keep_one_open(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping.is_set():
            stream = self.make(self._next)
            self._next += 1
            self.streams.append(stream)
            await self._follow(session, stream)

    async def _follow(self, session: aiohttp.ClientSession, stream: Stream) -> None:
        body = {
            "model": "m",
            "prompt": stream.prompt,
            "max_tokens": stream.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "temperature": 0.0 if stream.seed is None else 1.0,
            "seed": stream.seed or 0,
        }
        stream.times.append(time.monotonic())
        try:
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    stream.error = f"{response.status} {await response.text()}"
                    return
                async for line in response.content:
                    self._take(stream, line.decode().strip())
        except (aiohttp.ClientError, TimeoutError) as error:
            stream.error = repr(error)

    def _take(self, stream: Stream, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            stream.error = json.dumps(event["error"])
            return
        for choice in event["choices"]:
            if ids := choice.get("token_ids"):
                stream.token_ids += ids
                stream.times.append(time.monotonic())
            stream.finished |= choice.get("finish_reason") is not None


@asynccontextmanager
async def under_load(
    url: str,
    model: torch.nn.Module,
    *,
    width: int,
    vocab_size: int,
    tails: Callable[[], str] = lambda: "",
    excused: Callable[[Stream], bool] = lambda _: False,
) -> AsyncIterator[Load]:
    """Run streams during the block, and check the tokens of all streams at the end of the block.

    Args:
        url: URL of the gateway.
        model: the reference model.
        tails: returns the last log lines, for the message of a failure.
        excused: returns whether a stream may fail. Its tokens are checked nevertheless.
    """
    load = Load(url, width=width, vocab_size=vocab_size)
    running = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        load.stop()
        await asyncio.wait_for(running, timeout=300)
    print(f"{len(load.streams)} streams, longest gap {load.longest_gap_s:.2f} s")
    failed = [(stream.number, stream.error) for stream in load.failed if not excused(stream)]
    assert not failed, (
        f"{len(failed)} of {len(load.streams)} streams failed: {failed[:5]}\n{tails()}"
    )
    short = [
        (stream.number, len(stream.token_ids))
        for stream in load.streams
        if stream.finished and len(stream.token_ids) != stream.max_tokens
    ]
    assert not short, f"{len(short)} of {len(load.streams)} streams ended early: {short[:5]}"
    assert_right_tokens(
        model, [stream for stream in load.streams if stream.token_ids], "under load"
    )


@dataclass
class ShortRequest:
    """One request of `fresh_connections`."""

    began: float  # time.monotonic()
    error: str = ""  # empty: it was answered


@asynccontextmanager
async def fresh_connections(url: str) -> AsyncIterator[list[ShortRequest]]:
    """Send short requests during the block, each over a new connection. Check that none fails.

    Args:
        url: URL of the gateway.
    """
    stopping = asyncio.Event()
    asked: list[ShortRequest] = []

    async def ask() -> str:
        body = {"model": "m", "prompt": "on and on", "max_tokens": 4}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
                session.post(f"{url}/v1/completions", json=body) as response,
            ):
                return (
                    "" if response.status == 200 else f"{response.status} {await response.text()}"
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            return repr(error)

    async def keep_asking() -> None:
        while not stopping.is_set():
            asked.append(ShortRequest(time.monotonic()))
            asked[-1].error = await ask()

    asking = asyncio.create_task(keep_asking())
    try:
        yield asked
    finally:
        stopping.set()
        await asking
    failed = [request.error for request in asked if request.error]
    assert asked
    assert not failed, f"{len(failed)} of {len(asked)} short requests failed: {failed[:5]}"
