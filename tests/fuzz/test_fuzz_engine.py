"""Random messages to an engine: its ZMQ port and its admin HTTP port.

See support/fuzz/fuzz_target.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from baton_protocol.engine_client.engine_client import EngineClient
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    ClientHello,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineCoreResponseType,
    KVSide,
    KVTransferParams,
    Ping,
    PrefillResult,
    UtilityRequest,
)
from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    CacheConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import (
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
    StructuredOutputKind,
)
from baton_protocol.service_key import ServiceKey
from support.completions import generate
from support.fuzz.fuzz_target import TIMEOUT_S, FuzzTarget
from support.fuzz.http_cases import HTTPCases
from support.fuzz.http_client import HTTPFuzzer
from support.fuzz.raw_client import connect_tcp, send_raw, zmtp
from support.fuzz.zmq_client import (
    ANSWER_TIMEOUT_S,
    ZMQFuzzer,
    encode_msgpack,
    mutate_frames,
    mutate_message,
)
from support.pods import Pod, Pods, pods

pytestmark = pytest.mark.timeout(TIMEOUT_S)
#: A short context bounds the work of requests without max_tokens.
MAX_MODEL_LEN = 64
#: Sleep frees the pages of the KV cache, so a large cache would change the measured memory.
KV_BYTES = 4 * 2**20
PARAMS = [
    SamplingParams(max_tokens=2),
    SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        max_tokens=4,
        min_tokens=1,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={3: 1.5},
        logprobs=3,
        prompt_logprobs=2,
        allowed_token_ids=[1, 2, 3, 4, 5],
        bad_words_token_ids=[[1, 2], [3]],
        repetition_detection=RepetitionDetection(3, 1, 2),
    ),
    SamplingParams(max_tokens=3, beam_width=3, length_penalty=0.5, early_stopping=True),
    *(
        SamplingParams(max_tokens=3, structured_output=StructuredOutput(kind, spec))
        for kind, spec in (
            (StructuredOutputKind.JSON, '{"type": "object", "properties": {"a": {"enum": [1]}}}'),
            (StructuredOutputKind.REGEX, "[a-c]{2,4}"),
            (StructuredOutputKind.CHOICE, '["yes", "no"]'),
            (StructuredOutputKind.GRAMMAR, 'start: "a" | "b"'),
            (StructuredOutputKind.JSON_OBJECT, ""),
        )
    ),
]
#: All utility methods except drain, which would end the run.
UTILITIES = [
    UtilityRequest(1, method, arguments)
    for method, arguments in (
        ("get_stats", []),
        ("is_paused", []),
        ("is_sleeping", []),
        ("pause", ["abort"]),
        ("reset_prefix_cache", []),
        ("resume", []),
        ("sleep", [1]),
        ("wake_up", []),
        ("start_profile", []),
        ("stop_profile", []),
        ("no_such_method", []),
    )
]


class EngineFuzzer(ZMQFuzzer):
    """Sends messages like those of a gateway, with random changes."""

    _instance_id = b""

    def make(self, rng: random.Random) -> list[bytes]:
        kind, message = self._message(rng)
        frames = [kind.value, self._instance_id, mutate_message(message, rng)]
        if rng.random() < 0.05:
            frames[0] = rng.choice(list(EngineCoreRequestType)).value
        return mutate_frames(frames, rng) if rng.random() < 0.15 else frames

    def _message(self, rng: random.Random) -> tuple[EngineCoreRequestType, Any]:
        name = f"r{rng.randrange(20_000)}"
        choice = rng.random()
        if choice < 0.6:
            return EngineCoreRequestType.ADD, self._request(name, rng)
        if choice < 0.7:
            return EngineCoreRequestType.ABORT, [name, f"r{rng.randrange(20_000)}"]
        if choice < 0.77:
            return EngineCoreRequestType.PREFILL_RESULT, PrefillResult(name, [1, 2], "failed")
        if choice < 0.9:
            return EngineCoreRequestType.UTILITY, rng.choice(UTILITIES)
        if choice < 0.95:
            return EngineCoreRequestType.PING, Ping(3)
        return EngineCoreRequestType.HELLO, ClientHello(PROTOCOL_VERSION, "fuzzer", True)

    def _request(self, name: str, rng: random.Random) -> EngineCoreRequest:
        request = EngineCoreRequest(
            name, [rng.randrange(500) for _ in range(rng.choice((1, 8, 40)))], rng.choice(PARAMS)
        )
        if rng.random() < 0.3:
            request.generated_token_ids = [5, 6]
            request.sample_index, request.arrival_time, request.priority = 1, 1.5, -3
            request.cache_salt, request.data_parallel_rank = "salt", 0
        if rng.random() < 0.1:
            request.group_id = f"g{rng.randrange(100)}"
        if rng.random() < 0.1:
            side = rng.choice(list(KVSide))
            request.kv_transfer = KVTransferParams(side, name, "peer", "127.0.0.1", 1)
        return request

    def begin_connection(self, peer: zmq.Socket[bytes], rng: random.Random) -> None:
        hello = msgspec.msgpack.encode(ClientHello(PROTOCOL_VERSION, "fuzzer"))
        peer.send_multipart([EngineCoreRequestType.HELLO.value, b"", hello])
        self._instance_id = peer.recv_multipart()[1]

    def check(self, peer: zmq.Socket[bytes]) -> None:
        """Resume the engine, and wait until it has answered."""
        self.begin_connection(peer, random.Random())
        for call_id, method in enumerate(("wake_up", "resume", "get_stats")):
            call = encode_msgpack([call_id, method])
            peer.send_multipart([EngineCoreRequestType.UTILITY.value, self._instance_id, call])
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        answers = 0
        while answers < 3:
            assert time.monotonic() < deadline, f"no answer\n{self.target.pod.tail()}"
            kind, *_ = peer.recv_multipart()
            if kind == EngineCoreResponseType.OUTPUTS:
                answers += 1


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with pods(tmp_path_factory.mktemp("engines"), 21) as group:
        yield group


@pytest.fixture(scope="module")
def start(group: Pods, checkpoint: Path) -> Callable[[str, str], Pod]:
    def start(name: str, key_file: str = "") -> Pod:
        engine = group.engine(
            name,
            checkpoint,
            cache=CacheConfig(memory_bytes=KV_BYTES),
            scheduler=SchedulerConfig(max_num_seqs=64),
            service_key_file=key_file,
            max_model_len=MAX_MODEL_LEN,
        )
        engine.wait_ready(ENGINE_HTTP_PORT)
        return engine

    return start


def tokens_of(engine: Pod, key: ServiceKey | None) -> list[int]:
    """Return the tokens of a greedy request to the engine."""

    async def ask() -> list[int]:
        async with EngineClient(
            engine.address, ENGINE_PORT, client_id="honest", service_key=key
        ) as client:
            await client.connect(ANSWER_TIMEOUT_S)
            await client.wait_ready(ANSWER_TIMEOUT_S)
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            return await generate(client, EngineCoreRequest("honest", [1, 2, 3, 4], params))

    token_ids = asyncio.run(ask())
    assert len(token_ids) == 8
    return token_ids


@pytest.mark.parametrize("is_keyed", [False, True], ids=["no key", "key"])
def test_peers(start: Callable[[str, str], Pod], key_file: str, is_keyed: bool) -> None:
    """Clients that may connect: all if the server has no key, else those with the key."""
    name = "keyed" if is_keyed else "open"
    engine = start(name, key_file if is_keyed else "")
    key = ServiceKey.load(key_file) if is_keyed else None
    expected = tokens_of(engine, key)

    def is_right() -> None:
        assert tokens_of(engine, key) == expected

    target = FuzzTarget(engine, f"engine, {name}")
    fuzzer = EngineFuzzer(target, f"tcp://{engine.address}:{ENGINE_PORT}", key)
    with target.checking(is_right):
        fuzzer.run()
    assert fuzzer.num_answers


def test_strangers(start: Callable[[str, str], Pod], key_file: str) -> None:
    """Clients without the key, which fail in ZeroMQ's handshake, are refused and counted."""
    engine = start("strangers", key_file)
    key = ServiceKey.load(key_file)
    expected = tokens_of(engine, key)

    def is_right() -> None:
        assert tokens_of(engine, key) == expected

    target = FuzzTarget(engine, "engine, strangers")
    with target.checking(is_right):
        send_raw(target, partial(connect_tcp, engine.address, ENGINE_PORT), zmtp)
    assert engine.metric("baton:access_refused_total") > 0


GETS = ("/health", "/ready", "/metrics", "/drain?x", "/is_paused", "/is_sleeping", "/is_paused?x=1")
POSTS = (
    "/pause?mode=abort",
    "/pause?mode=keep",
    "/pause?mode=wait&clear_cache=maybe",
    "/pause?mode",
    "/resume",
    "/resume?%00=%ff",
    "/sleep?level=1",
    "/sleep?level=999999999999",
    "/wake_up?tags=weights",
    "/wake_up?tags=weights,x&tags=" + "kv_cache," * 500,
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
)


@pytest.fixture(scope="module")
def admin(start: Callable[[str, str], Pod], key_file: str) -> Pod:
    return start("admin", key_file)


def test_admin_http(admin: Pod, key_file: str) -> None:
    """Requests with the key. None drains the engine, which would end the run."""
    key = ServiceKey.load(key_file)
    assert key is not None
    expected = tokens_of(admin, key)

    def is_right() -> None:
        for path in ("/wake_up", "/resume"):
            post(admin, path, key)
        assert tokens_of(admin, key) == expected

    bearer = (b"Authorization", key.bearer.encode())
    target = FuzzTarget(admin, "engine, admin HTTP")
    bodies = [("POST", path, None) for path in POSTS] + [("POST", "/resume", {"a": [1]})]
    cases = HTTPCases(bodies, GETS, [bearer])
    fuzzer = HTTPFuzzer(target, ENGINE_HTTP_PORT, cases, allowed={503, 505})
    with target.checking(is_right):
        asyncio.run(fuzzer.run())
    assert all(fuzzer.statuses[status] for status in (200, 400, 404, 409)), fuzzer.statuses


def test_admin_http_strangers(admin: Pod, key_file: str) -> None:
    """Requests without the key, which change nothing and are counted."""
    key = ServiceKey.load(key_file)
    assert key is not None
    for path in ("/wake_up", "/resume"):
        post(admin, path, key)
    expected = tokens_of(admin, key)

    def is_unchanged() -> None:
        assert json.loads(admin.get(ENGINE_HTTP_PORT, "/drain")[1])["draining"] is False
        assert tokens_of(admin, key) == expected, "paused or asleep"

    paths = [*POSTS, "/drain", "/drain?x"]
    bodies = [("POST", path, None) for path in paths] + [("POST", "/drain", {"a": [1]})]
    target = FuzzTarget(admin, "engine, admin HTTP, strangers")
    cases = HTTPCases(bodies, [*GETS, "/drain"])
    fuzzer = HTTPFuzzer(target, ENGINE_HTTP_PORT, cases, allowed={503, 505})
    before = admin.metric("baton:access_refused_total")
    with target.checking(is_unchanged):
        asyncio.run(fuzzer.run())
    assert admin.metric("baton:access_refused_total") > before
    assert fuzzer.statuses[401]


def post(engine: Pod, path: str, key: ServiceKey) -> None:
    request = urllib.request.Request(
        f"http://{engine.address}:{ENGINE_HTTP_PORT}{path}",
        b"",
        {"Authorization": key.bearer},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status in (200, 202)
