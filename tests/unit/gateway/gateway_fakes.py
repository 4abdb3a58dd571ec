"""A scripted engine that speaks the real protocol over a real ROUTER, and a gateway around such engines."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
import openai
import zmq
import zmq.asyncio

from baton_gateway.discovery import FileDiscovery
from baton_gateway.server import Gateway
from baton_protocol.config import (
    DiscoveryConfig,
    EngineEndpoint,
    EngineEndpoints,
    GatewayConfig,
    ModelConfig,
)
from baton_protocol.messages import (
    PROTOCOL_VERSION,
    BeamOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineCoreResponseType,
    ErrorCode,
    FinishReason,
    Init,
    KVSide,
    Ping,
    Pong,
    PrefillResult,
    Ready,
    TokenLogprobs,
)
from baton_text.tokenizer import Tokenizer

DEADLINE_S = 60.0


async def until(probe: Callable[[], Any], what: str) -> Any:
    """The first true value of `probe` (or of what it awaits); fails with `what` was missing."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        value = probe()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert asyncio.get_running_loop().time() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        await asyncio.sleep(0.01)


def http_session() -> aiohttp.ClientSession:
    """One whose requests fail when they have no answer in time."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S))


class FakeEngine:
    """Answers every request with the tokens of `answer`, whatever the prompt, honouring the protocol's life cycle.

    Script it through the attributes: tests set what is to go wrong.
    """

    def __init__(
        self, name: str, role: str, answer: list[int], *, port: int = 0, config_hash: str = "h"
    ) -> None:
        self.name = name
        self.role = role
        self.answer = answer
        self.config_hash = config_hash
        self.instance_id = uuid.uuid4().hex
        self.max_model_len = 256
        self.refuse: tuple[ErrorCode, str] | None = None
        self.die_on_add = False
        self.hold_after: int | None = None
        """No more tokens come once this many exist, until `released` is set."""
        self.released = asyncio.Event()
        self.offset_error = 0
        self.repeats = False
        """Ends with REPETITION instead of LENGTH."""
        self.tokens_per_output = 1
        self.seams: deque[tuple[int, ErrorCode]] = deque()
        """Engines may share them: a request takes the next one and ends with the error once so many tokens exist."""
        self.rank, self.size = 0, 1
        self.draining = False
        self.num_running = 0
        """As told in heartbeats."""
        self.num_hellos = 0
        self.cached_tokens: Callable[[EngineCoreRequest], int] = lambda _: 0
        self.adds: list[EngineCoreRequest] = []
        self.aborts: list[str] = []
        self.prefill_results: dict[str, PrefillResult] = {}
        self._results: dict[str, asyncio.Future[PrefillResult]] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._peers: dict[str, bytes] = {}
        """Of requests."""
        self._last_peer = b""
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._bind(f"tcp://127.0.0.1:{port or '*'}")
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rsplit(":", 1)[1])
        self._task = asyncio.create_task(self._serve())

    def _bind(self, address: str) -> None:
        """A predecessor's port is free only when ZMQ's own thread has closed it, a moment after `die`."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._socket.bind(address)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise

    @property
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(
            name=self.name, role=self.role, host="127.0.0.1", engine_port=self.port, kv_port=5558
        )

    def die(self) -> None:
        """As kill -9: the connection goes, nothing more is said."""
        for task in [self._task, *self._work.values()]:
            task.cancel()
        if not self._socket.closed:
            self._socket.close(linger=0)

    def freeze(self) -> None:
        """As SIGSTOP: connected, but nothing is heard, computed or said until `thaw`."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def retire(self) -> None:
        """Leaves its generation: ends what it runs, and says in heartbeats that it drains."""
        self.draining = True
        for request_id, task in self._work.items():
            if not task.done():
                task.cancel()
                output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
                output.error, output.error_code = "the rank left its generation", ErrorCode.DRAINING
                self._output(self._peers[request_id], output)

    def admit(self, rank: int, size: int) -> None:
        """Is part of a generation (again)."""
        self.rank, self.size, self.draining = rank, size, False
        self._send(self._last_peer, EngineCoreResponseType.READY, self._ready)

    @property
    def _ready(self) -> Ready:
        return Ready(self.max_model_len, 64, 16, self.rank, self.size)

    @property
    def num_unfinished(self) -> int:
        return sum(not task.done() for task in self._work.values())

    async def _serve(self) -> None:
        while True:
            peer, kind, identity, payload = await self._socket.recv_multipart()
            await self._thawed.wait()
            if kind == EngineCoreRequestType.HELLO.value:
                self.num_hellos += 1
                self._last_peer = peer
                self._send(
                    peer,
                    EngineCoreResponseType.INIT,
                    Init(PROTOCOL_VERSION, self.instance_id, self.config_hash),
                )
                self._send(peer, EngineCoreResponseType.READY, self._ready)
                continue
            assert identity.decode() == self.instance_id
            if kind == EngineCoreRequestType.PING.value:
                sequence = msgspec.msgpack.decode(payload, type=Ping).sequence
                self._send(
                    peer,
                    EngineCoreResponseType.PONG,
                    Pong(sequence, self.draining, self.num_running),
                )
            elif kind == EngineCoreRequestType.ADD.value:
                request = msgspec.msgpack.decode(payload, type=EngineCoreRequest)
                self.adds.append(request)
                self._peers[request.request_id] = peer
                self._work[request.request_id] = asyncio.create_task(self._run(peer, request))
            elif kind == EngineCoreRequestType.ABORT.value:
                for request_id in msgspec.msgpack.decode(payload, type=list[str]):
                    self._abort(peer, request_id)
            elif kind == EngineCoreRequestType.PREFILL_RESULT.value:
                result = msgspec.msgpack.decode(payload, type=PrefillResult)
                assert result.request_id not in self.prefill_results, (
                    "PREFILL_RESULT must come once"
                )
                self.prefill_results[result.request_id] = result
                self._result(result.request_id).set_result(result)

    def _result(self, request_id: str) -> asyncio.Future[PrefillResult]:
        return self._results.setdefault(request_id, asyncio.get_running_loop().create_future())

    def _abort(self, peer: bytes, request_id: str) -> None:
        self.aborts.append(request_id)
        task = self._work.pop(request_id, None)
        if task is not None and not task.done():
            task.cancel()
            self._output(peer, EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT))

    async def _run(self, peer: bytes, request: EngineCoreRequest) -> None:
        if self.die_on_add:
            self.die()
            return
        if self.refuse is not None or self.draining:
            code, text = self.refuse or (ErrorCode.DRAINING, "this rank is in no generation")
            reason = FinishReason.LENGTH if code is ErrorCode.LENGTH else FinishReason.ERROR
            output = EngineCoreOutput(
                request.request_id, [], finish_reason=reason, error=text, error_code=code
            )
            self._output(peer, output)
            return
        if request.sampling_params.beam_width:
            if self.hold_after is not None:
                await self.released.wait()
            self._output(peer, self._beams(request))
            return
        done = len(request.generated_token_ids)
        seam = self.seams.popleft() if self.seams else None
        if request.kv_transfer is not None and request.kv_transfer.side is KVSide.CONSUME:
            result = await self._result(request.request_id)
            done += len(result.token_ids)
        limit = min(len(self.answer), request.sampling_params.max_tokens or len(self.answer))
        while True:
            if self.hold_after is not None and done >= self.hold_after:
                await self.released.wait()
            await self._thawed.wait()
            end = min(done + self.tokens_per_output, limit)
            if seam is not None:
                if done >= seam[0]:
                    output = EngineCoreOutput(
                        request.request_id, [], finish_reason=FinishReason.ERROR
                    )
                    output.error, output.error_code = "a seam", seam[1]
                    self._output(peer, output)
                    return
                end = min(end, seam[0])
            tokens = self.answer[done:end]
            stop = self._stop_token(request, tokens)
            finish = FinishReason.STOP if stop is not None else None
            lost_at_end = (
                seam is not None and seam[0] == end
            )  # the word that it was the last token is lost, too
            if finish is None and done + len(tokens) >= limit and not lost_at_end:
                finish = FinishReason.REPETITION if self.repeats else FinishReason.LENGTH
            logprobs = None
            if request.sampling_params.logprobs is not None:
                top = [(token, -0.5) for token in range(request.sampling_params.logprobs)]
                # Samples differ in their probability: the higher the index, the likelier.
                logprob = -0.25 / (request.sample_index + 1)
                logprobs = [TokenLogprobs(token, logprob, 1, top) for token in tokens]
            offset = done + self.offset_error
            output = EngineCoreOutput(
                request.request_id, tokens, offset, finish, stop, new_logprobs=logprobs
            )
            if done == len(request.generated_token_ids):
                output.num_cached_tokens = self.cached_tokens(request)
            if done == 0:
                output.prompt_logprobs = self._prompt_logprobs(request)
            self._output(peer, output)
            done += len(tokens)
            if finish is not None:
                return
            await asyncio.sleep(0)

    def _beams(self, request: EngineCoreRequest) -> EngineCoreOutput:
        """Beam i is the answer without its last i tokens."""
        beams = [
            BeamOutput(
                self.answer[: len(self.answer) - index],
                -1.0 - index,
                -0.1 - index,
                FinishReason.LENGTH,
            )
            for index in range(request.sampling_params.beam_width)
        ]
        output = EngineCoreOutput(
            request.request_id, beams[0].token_ids, finish_reason=FinishReason.LENGTH, beams=beams
        )
        output.prompt_logprobs = self._prompt_logprobs(request)
        return output

    def _prompt_logprobs(self, request: EngineCoreRequest) -> list[TokenLogprobs] | None:
        if request.sampling_params.prompt_logprobs is None:
            return None
        return [
            TokenLogprobs(token, -1.5, 2, [(7, -0.5)]) for token in request.prompt_token_ids[1:]
        ]

    def _stop_token(self, request: EngineCoreRequest, tokens: list[int]) -> int | None:
        stops = {*request.sampling_params.stop_token_ids, EOS_ID}
        return tokens[-1] if tokens and tokens[-1] in stops else None

    def _output(self, peer: bytes, output: EngineCoreOutput) -> None:
        self._send(peer, EngineCoreResponseType.OUTPUTS, EngineCoreOutputs([output]))

    def _send(self, peer: bytes, kind: EngineCoreResponseType, payload: Any) -> None:
        if not self._socket.closed:
            self._socket.send_multipart(
                [peer, kind.value, self.instance_id.encode(), msgspec.msgpack.encode(payload)]
            )


EOS_ID = 1
"""Of the test tokenizer: <|endoftext|> is trained in as the second special token."""


class Stand:
    """A gateway, its discovery file and its engines."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        prefill_timeout_s: float = DEADLINE_S,
        **config: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.file = folder / "engines.json"
        self.engines: list[FakeEngine] = []
        self.config = GatewayConfig(
            model=ModelConfig(path="/models/m", served_name="m"),
            discovery=DiscoveryConfig(file=str(self.file)),
            **{
                "port": 0,
                "drain_timeout_s": 5.0,
                "resume_wait_s": 3.0,
                "queue_wait_s": 0.5,
                **config,
            },
        )
        self.gateway = Gateway(
            self.config,
            tokenizer,
            FileDiscovery(self.file, poll_s=0.02),
            prefill_timeout_s=prefill_timeout_s,
            max_backoff_s=0.2,
        )
        self.url = ""
        self._clients: list[openai.AsyncOpenAI] = []

    def engine(self, name: str, role: str, text: str = "hello world", **options: Any) -> FakeEngine:
        """An engine that answers `text`."""
        answer = self.tokenizer.encode(text, add_special_tokens=False)
        engine = FakeEngine(name, role, answer, **options)
        self.engines.append(engine)
        return engine

    def announce(self, *engines: FakeEngine) -> None:
        """Writes these, and only these, into the discovery file."""
        self.announce_endpoints(*(engine.endpoint for engine in engines))

    def announce_endpoints(self, *endpoints: EngineEndpoint) -> None:
        self.file.write_bytes(msgspec.json.encode(EngineEndpoints(engines=list(endpoints))))

    async def start(self, *engines: FakeEngine) -> None:
        """Announces `engines`, starts the gateway and waits until all of them are connected."""
        self.announce(*engines)
        port = await self.gateway.start("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        await self.connected(*engines)

    async def connected(self, *engines: FakeEngine) -> None:
        """Waits until exactly these take requests."""
        wanted = {engine.instance_id for engine in engines}

        def there() -> bool:
            members = self.gateway.pool.available("prefill") + self.gateway.pool.available("decode")
            return {member.ready_client.instance_id for member in members} == wanted

        await until(there, f"engines {[engine.name for engine in engines]} connected")

    def client(self) -> openai.AsyncOpenAI:
        """Closed with the stand."""
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
        )
        self._clients.append(client)
        return client

    async def post(
        self, path: str, body: Any, **options: Any
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of a POST of `body` (raw if bytes)."""
        options |= {"data": body} if isinstance(body, bytes) else {"json": body}
        async with http_session() as session, session.post(self.url + path, **options) as response:
            return response.status, await response.json(), dict(response.headers)

    async def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer to `body`, without the final [DONE]."""
        async with http_session() as session, session.post(self.url + path, json=body) as response:
            events = [
                event.removeprefix("data: ")
                for event in (await response.text()).split("\n\n")
                if event
            ]
            assert events[-1] == "[DONE]", events[-1]
            return [msgspec.json.decode(event) for event in events[:-1]]

    async def get(self, path: str) -> tuple[int, str]:
        async with http_session() as session, session.get(self.url + path) as response:
            return response.status, await response.text()

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.gateway.stop()
        for engine in self.engines:
            engine.die()


class MakeStand(Protocol):
    """A stand with these fields of its configuration."""

    def __call__(self, **config: Any) -> Stand: ...
