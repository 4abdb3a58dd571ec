"""A scripted engine with the real protocol on a real ROUTER socket.

For the tests of the gateway, and for its benchmark.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from baton_protocol.engine_messages import (
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
from baton_protocol.options.config import EngineEndpoint
from baton_protocol.pooling_params import PairFormat, PoolingParams, Task
from support.waiting import until

DEADLINE_S = 60.0
#: The test tokenizer's <|endoftext|>, its second special token.
EOS_ID = 1


def vector_of(prompt: list[int]) -> list[float]:
    """Return the vector with which a pooling `FakeEngine` answers a prompt."""
    return [float(len(prompt)), float(prompt[0]), 0.5, -1.5]


async def busy(engines: list[FakeEngine], count: int = 1) -> FakeEngine:
    """Return the engine that runs `count` requests."""
    return await until(
        lambda: next((engine for engine in engines if engine.num_unfinished == count), None),
        "the requests at an engine",
    )


class FakeEngine:
    """Answers with the tokens that tests script. Tests set attributes to script faults."""

    def __init__(
        self,
        name: str,
        role: str,
        answer: list[int],
        *,
        port: int = 0,
        compatibility_hash: str = "h",
        kv_transport: str = "ucx",
        hold_after: int | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.answer = answer
        #: Returns the tokens of the answer to a request. By default, all answers are `answer`.
        self.answer_to: Callable[[EngineCoreRequest], list[int]] = lambda _: self.answer
        self.compatibility_hash = compatibility_hash
        self.kv_transport = kv_transport
        self.instance_id = uuid.uuid4().hex
        self.max_model_len = 256
        #: The task of the engine. With EMBED, it answers each prompt with `vector_of`.
        self.task = Task.GENERATE
        self.pair_format: PairFormat | None = None
        self.refuse: tuple[ErrorCode, str] | None = None
        self.die_on_add = False
        #: Number of tokens after which it sends no more until `released` is set.
        self.hold_after = hold_after
        self.released = asyncio.Event()
        self.offset_error = 0
        #: NaN logits that every output reports.
        self.num_nans = 0
        #: Requests end with REPETITION instead of LENGTH.
        self.repeats = False
        self.tokens_per_output = 1
        #: Seconds between two outputs of a request.
        self.step_s = 0.0
        #: (number of tokens, error). Each request takes the next one, and fails with the error
        #: after that many tokens. Engines may share them.
        self.planned_errors: deque[tuple[int, ErrorCode]] = deque()
        self.rank, self.size = 0, 1
        self.draining = False
        #: Reported in PONGs.
        self.num_running = 0
        self.paused, self.asleep = False, False
        self.stalled_s, self.longest_step_s = 0.0, 0.0
        self.num_hellos = 0
        self.cached_tokens: Callable[[EngineCoreRequest], int] = lambda _: 0
        self.adds: list[EngineCoreRequest] = []
        self.aborts: list[str] = []
        self.prefill_results: dict[str, PrefillResult] = {}
        self._results: dict[str, asyncio.Future[PrefillResult]] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        #: Request id -> peer.
        self._peers: dict[str, bytes] = {}
        self._last_peer = b""
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._bind(f"tcp://127.0.0.1:{port or '*'}")
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rsplit(":", 1)[1])
        self._task = asyncio.create_task(self._serve())

    def _bind(self, address: str) -> None:
        """Bind the socket. Retry, because ZMQ frees the port of a dead engine in the background."""
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
        """Simulate kill -9: close the connection without sending anything more."""
        for task in [self._task, *self._work.values()]:
            task.cancel()
        if not self._socket.closed:
            self._socket.close(linger=0)

    def release(self) -> None:
        """Send the tokens that are held, and hold none from now on."""
        self.hold_after = None
        self.released.set()

    def freeze(self) -> None:
        """Simulate SIGSTOP: stay connected, but receive and send nothing until `thaw()`."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def retire(self) -> None:
        """Leave the generation: fail running requests and report draining in heartbeats."""
        self.draining = True
        for request_id, task in self._work.items():
            if not task.done():
                task.cancel()
                output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
                output.error, output.error_code = "the rank left its generation", ErrorCode.DRAINING
                self._output(self._peers[request_id], output)

    def admit(self, rank: int, size: int) -> None:
        """Join a generation and send READY."""
        self.rank, self.size, self.draining = rank, size, False
        self._send(self._last_peer, EngineCoreResponseType.READY, self._ready)

    def pool(self, task: Task, pair_format: PairFormat = PairFormat.QWEN3_RERANKER) -> None:
        """Serve `task`. A classifier takes pairs in this format. Call this before `announce`."""
        self.task = task
        if task is Task.CLASSIFY:
            self.pair_format = pair_format
            self.max_model_len = 1024  # room for the conversation around a pair

    @property
    def _ready(self) -> Ready:
        return Ready(self.max_model_len, self.rank, self.size, self.task, self.pair_format)

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
                    Init(
                        PROTOCOL_VERSION,
                        self.instance_id,
                        self.compatibility_hash,
                        kv_transport=self.kv_transport,
                    ),
                )
                self._send(peer, EngineCoreResponseType.READY, self._ready)
                continue
            assert identity.decode() == self.instance_id
            if kind == EngineCoreRequestType.PING.value:
                sequence = msgspec.msgpack.decode(payload, type=Ping).sequence
                pong = Pong(
                    sequence,
                    self.draining,
                    self.num_running,
                    paused=self.paused,
                    asleep=self.asleep,
                    stalled_s=self.stalled_s,
                    longest_step_s=self.longest_step_s,
                )
                self._send(peer, EngineCoreResponseType.PONG, pong)
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
                assert result.request_id not in self.prefill_results, "a second PREFILL_RESULT"
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
        if request.pooling_params is not None:
            if self.hold_after is not None:
                await self.released.wait()
            self._output(peer, self._pooled(request, request.pooling_params))
            return
        if request.sampling_params.beam_width:
            if self.hold_after is not None:
                await self.released.wait()
            self._output(peer, self._beams(request))
            return
        done = len(request.generated_token_ids)
        planned_error = self.planned_errors.popleft() if self.planned_errors else None
        if request.kv_transfer is not None and request.kv_transfer.side is KVSide.CONSUME:
            result = await self._result(request.request_id)
            done += len(result.token_ids)
        answer = self.answer_to(request)
        limit = min(len(answer), request.sampling_params.max_tokens or len(answer))
        while True:
            if self.hold_after is not None and done >= self.hold_after:
                await self.released.wait()
            await self._thawed.wait()
            end = min(done + self.tokens_per_output, limit)
            if planned_error is not None:
                if done >= planned_error[0]:
                    output = EngineCoreOutput(
                        request.request_id, [], finish_reason=FinishReason.ERROR
                    )
                    output.error, output.error_code = "a planned error", planned_error[1]
                    self._output(peer, output)
                    return
                end = min(end, planned_error[0])
            tokens = answer[done:end]
            stop = self._stop_token(request, tokens)
            finish = FinishReason.STOP if stop is not None else None
            # The finish reason of the last token is also lost.
            lost_at_end = planned_error is not None and planned_error[0] == end
            if finish is None and done + len(tokens) >= limit and not lost_at_end:
                finish = FinishReason.REPETITION if self.repeats else FinishReason.LENGTH
            logprobs = None
            if request.sampling_params.logprobs is not None:
                top = [(token, -0.5) for token in range(request.sampling_params.logprobs)]
                # The probability of samples increases with their index.
                logprob = -0.25 / (request.sample_index + 1)
                logprobs = [TokenLogprobs(token, logprob, 1, top) for token in tokens]
            offset = done + self.offset_error
            output = EngineCoreOutput(
                request.request_id, tokens, offset, finish, stop, new_logprobs=logprobs
            )
            output.num_nans_in_logits = self.num_nans
            if done == len(request.generated_token_ids):
                output.num_cached_tokens = self.cached_tokens(request)
            if done == 0:
                output.prompt_logprobs = self._prompt_logprobs(request)
            self._output(peer, output)
            done += len(tokens)
            if finish is not None:
                return
            await self._next_step()

    async def _next_step(self) -> None:
        """Wait until a request may have its next output."""
        await asyncio.sleep(self.step_s)

    def _pooled(self, request: EngineCoreRequest, params: PoolingParams) -> EngineCoreOutput:
        vector = vector_of(request.prompt_token_ids)
        if params.normalize:
            vector = [value / math.hypot(*vector) for value in vector]
        if self.task is Task.CLASSIFY:
            vector = [len(request.prompt_token_ids) / 1000]
        output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.STOP)
        output.num_cached_tokens = self.cached_tokens(request)
        try:
            params.validate(self.task, len(vector))
        except ValueError as error:
            output.finish_reason, output.error = FinishReason.ERROR, str(error)
            output.error_code = ErrorCode.INVALID
        else:
            vector = vector[: params.dimensions]
            output.pooler_output = struct.pack(f"<{len(vector)}f", *vector)
        return output

    def _beams(self, request: EngineCoreRequest) -> EngineCoreOutput:
        """Return a beam search output. Beam i is `answer` without its last i tokens."""
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
