"""Untrusted processes attack running engines: they get no data and change nothing.

An attacker has no key, the key of another service, or only the servers' public key. It uses Baton's
own clients, so an engine that accepted its messages would process them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from baton_kv_transfer import auth, side_channel
from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError
from baton_protocol.engine_messages import (
    PROTOCOL_VERSION,
    ClientHello,
    EngineCoreRequest,
    EngineCoreRequestType,
    KVSide,
    KVTransferParams,
    PrefillResult,
    UtilityRequest,
)
from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    GATEWAY_PORT,
    KV_PORT,
    KVRole,
)
from baton_protocol.sampling_params import SamplingParams
from baton_protocol.service_key import ServiceKey
from support.completions import VOCAB, complete, engine_client, generate
from support.parity import prompts
from support.pods import Pod, Pods, pods
from support.waiting import eventually, until

KEY_TEXT = "5e" * 32
KEY = ServiceKey(KEY_TEXT.encode())
DEADLINE_S = 60.0
#: File descriptors that metrics and requests of users need briefly.
SPARE = 4
#: Time for which an attacker waits for a response that must not arrive. A valid one takes
#: milliseconds.
SILENCE_S = 1.0


class WithPublicKey(ServiceKey):
    """The key of an attacker that has only the servers' public key."""

    def __init__(self) -> None:
        super().__init__(b"the key that an attacker invented")

    def protect_client(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_serverkey = KEY._curve_keys("server")[0]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


ATTACKERS: dict[str, ServiceKey | None] = {
    "no key": None,
    "another key": ServiceKey(b"the key of another service"),
    "the servers' public key": WithPublicKey(),
}


@dataclass
class Service:
    group: Pods
    checkpoint: Path
    prefill: Pod
    decode: Pod
    gateway: Pod
    seeds: Iterator[int] = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}:{GATEWAY_PORT}/v1"

    @property
    def engines(self) -> tuple[Pod, Pod]:
        return self.prefill, self.decode

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Run requests of two users during the block. All are answered by hand-off."""
        stop = asyncio.Event()
        answered = 0

        async def user() -> None:
            nonlocal answered
            while not stop.is_set() or not answered:
                # A prompt that was sent before is in the prefix cache and moves no bytes.
                (prompt,) = prompts(1, VOCAB, longest=100, seed=next(self.seeds))
                assert len(await complete(self.url, prompt, 16)) == 16
                answered += 1

        users = [asyncio.create_task(user()) for _ in range(2)]
        moved = self.decode.metric("baton:kv_transfer_bytes_received_total")
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*users)
        await until(
            lambda: self.decode.metric("baton:kv_transfer_bytes_received_total") > moved,
            "KV bytes at the decode pod",
        )
        assert "reconnecting" not in self.gateway.log.read_text()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("service-key") / "key"
    path.write_text(f"{KEY_TEXT}\n")
    return str(path)


@pytest.fixture(scope="module")
def service(
    checkpoints: dict[str, Path], key_file: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    checkpoint = checkpoints["qwen3"]
    with pods(tmp_path_factory.mktemp("attacked"), 31) as group:
        prefill = group.engine("prefill", checkpoint, KVRole.PRODUCER, service_key_file=key_file)
        decode = group.engine(
            "decode", checkpoint, KVRole.CONSUMER, kv_mode="push", service_key_file=key_file
        )
        engines = {prefill: "prefill", decode: "decode"}
        gateway = group.gateway("gateway", checkpoint, engines, service_key_file=key_file)
        for pod in engines:
            pod.wait_ready(ENGINE_HTTP_PORT, DEADLINE_S)
        gateway.wait_ready(GATEWAY_PORT, DEADLINE_S)
        yield Service(group, checkpoint, prefill, decode, gateway)


def num_refused(pod: Pod, door: str) -> float:
    _, body = pod.get(ENGINE_HTTP_PORT, "/metrics")
    (line,) = [
        line
        for line in body.splitlines()
        if line.startswith(f'baton:access_refused_total{{door="{door}"}}')
    ]
    return float(line.split()[-1])


def write_key(folder: Path, kind: str) -> str:
    """Return the key file of a process with "no key" or "another key"."""
    if kind == "no key":
        return ""
    (folder / "key").write_text("another service's key")
    return str(folder / "key")


def post(pod: Pod, path: str, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    request = urllib.request.Request(
        f"http://{pod.address}:{ENGINE_HTTP_PORT}{path}", data=b"", method="POST", headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def num_descriptors(pod: Pod) -> int:
    return len(os.listdir(f"/proc/{pod.process.pid}/fd"))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


# The engines' ROUTER socket: requests and utility calls


@pytest.mark.parametrize("attacker", ATTACKERS)
async def test_an_engine_refuses_the_connection_of_an_attacker(
    service: Service, attacker: str
) -> None:
    async with service.serving():
        for pod in service.engines:
            before = num_refused(pod, "engine")
            client = EngineClient(
                pod.address, ENGINE_PORT, client_id="attacker", service_key=ATTACKERS[attacker]
            )
            with pytest.raises(EngineDeadError, match=r"cannot connect: tcp://.*"):
                await client.connect(DEADLINE_S)
            await asyncio.to_thread(
                eventually,
                lambda pod=pod, before=before: num_refused(pod, "engine") > before,
                timeout_s=DEADLINE_S,
                what=f"{pod.name} counts the refusal",
            )
            assert "client attacker connected" not in pod.log.read_text()


@pytest.mark.parametrize("attacker", ATTACKERS)
async def test_an_engine_ignores_requests_of_an_attacker(service: Service, attacker: str) -> None:
    """The attacker has the instance id, and sends without waiting for a handshake."""
    request_id = f"stolen-{uuid.uuid4().hex}"
    for pod in service.engines:
        async with engine_client(pod, KEY) as client:
            before = pod.metric("baton:generation_tokens_total")
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                if (key := ATTACKERS[attacker]) is not None:
                    key.protect_client(dealer)
                dealer.connect(f"tcp://{pod.address}:{ENGINE_PORT}")
                for kind, payload in (
                    (
                        EngineCoreRequestType.HELLO,
                        ClientHello(PROTOCOL_VERSION, "thief", kv_events=True),
                    ),
                    (
                        EngineCoreRequestType.ADD,
                        EngineCoreRequest(request_id, list(range(50)), greedy(5)),
                    ),
                    (EngineCoreRequestType.ABORT, None),
                    (EngineCoreRequestType.UTILITY, UtilityRequest(1, "pause", ["abort"])),
                    (EngineCoreRequestType.UTILITY, UtilityRequest(2, "sleep", [2])),
                ):
                    with contextlib.suppress(zmq.Again):  # already disconnected
                        parts = [
                            kind.value,
                            client.instance_id.encode(),
                            msgspec.msgpack.encode(payload),
                        ]
                        dealer.send_multipart(parts, zmq.NOBLOCK)
                assert not await asyncio.to_thread(dealer.poll, int(SILENCE_S * 1000))
            assert pod.metric("baton:generation_tokens_total") == before
            assert await client.call("is_paused") is False
            assert await client.call("is_sleeping") is False
            request = EngineCoreRequest(uuid.uuid4().hex, [1, 2, 3], greedy(4))
            assert len(await generate(client, request)) == 4
        assert request_id not in pod.log.read_text()
        assert "thief" not in pod.log.read_text()


# HTTP: admin requests


@pytest.mark.parametrize(
    "authorization", [None, "Bearer", f"Bearer {KEY_TEXT}", ATTACKERS["another key"].bearer]
)  # type: ignore[union-attr]
async def test_admin_requests_without_the_key_are_refused(
    service: Service, authorization: str | None
) -> None:
    async with service.serving():
        for pod in service.engines:
            before = num_refused(pod, "http")
            paths = [
                "/drain",
                "/pause?mode=abort",
                "/sleep?level=2",
                "/reset_prefix_cache",
                "/start_profile",
            ]
            for path in paths:
                assert await asyncio.to_thread(post, pod, path, authorization) == 401
            assert num_refused(pod, "http") == before + len(paths)
            assert pod.get(ENGINE_HTTP_PORT, "/drain")[1].startswith('{"draining":false')
            for open_path in ("/health", "/ready", "/metrics"):
                assert pod.get(ENGINE_HTTP_PORT, open_path)[0] == 200


def test_the_gateway_has_no_admin_requests(service: Service) -> None:
    for path in ("/drain", "/pause", "/sleep", "/metrics", "/ready", "/health"):
        url = f"http://{service.gateway.address}:{GATEWAY_PORT}{path}"
        for authorization in (None, KEY.bearer):
            headers = {} if authorization is None else {"Authorization": authorization}
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(
                    urllib.request.Request(url, data=b"", headers=headers), timeout=10
                )
            assert error.value.code in (404, 405)


# The KV side channel


@pytest.mark.parametrize("attacker", ATTACKERS)
async def test_the_kv_side_channel_does_not_answer_an_attacker(
    service: Service, attacker: str
) -> None:
    """The attacker has the instance id and the compatibility hash, and receives no WELCOME."""
    async with EngineClient(
        service.prefill.address, ENGINE_PORT, client_id="trusted", service_key=KEY
    ) as client:
        init = await client.connect(DEADLINE_S)
    hello = side_channel.Hello(
        side_channel.VERSION, init.compatibility_hash, "D", init.instance_id, auth.new_nonce()
    )
    before = service.prefill.metric("baton:kv_transfer_handshakes_refused_total")

    def is_counted() -> bool:
        return service.prefill.metric("baton:kv_transfer_handshakes_refused_total") > before

    async with service.serving():
        with zmq.Context() as context:
            context.linger = 0
            for key, is_answered in ((ATTACKERS[attacker], False), (KEY, True)):
                with context.socket(zmq.DEALER) as dealer:
                    if key is not None:
                        key.protect_client(dealer)
                    dealer.connect(f"tcp://{service.prefill.address}:{KV_PORT}")
                    with contextlib.suppress(zmq.Again):
                        dealer.send(side_channel.encode(hello), zmq.NOBLOCK)
                    timeout_s = DEADLINE_S if is_answered else SILENCE_S
                    received = await asyncio.to_thread(dealer.poll, int(timeout_s * 1000))
                    assert bool(received) == is_answered
                    if is_answered:
                        assert isinstance(
                            side_channel.decode_to_consumer(dealer.recv()), side_channel.Welcome
                        )
        await asyncio.to_thread(
            eventually, is_counted, timeout_s=DEADLINE_S, what="the refusal is counted"
        )


@pytest.mark.parametrize("attacker", ["no key", "another key"])
async def test_an_engine_of_another_service_receives_no_kv(
    service: Service, tmp_path: Path, attacker: str
) -> None:
    """A decode engine without the key cannot load a prompt's KV, so it computes the prompt."""
    key_file = write_key(tmp_path, attacker)
    with pods(tmp_path, 32) as group:
        thief = group.engine(
            "thief",
            service.checkpoint,
            KVRole.CONSUMER,
            kv_mode="pull",
            service_key_file=key_file,
        )
        thief.wait_ready(ENGINE_HTTP_PORT, DEADLINE_S)
        async with service.serving():
            assert len(await hand_off(service.prefill, thief, ServiceKey.load(key_file))) == 8
        assert thief.metric("baton:prompt_tokens_remote_total") == 0
        assert thief.metric("baton:kv_transfer_bytes_received_total") == 0
        assert thief.metric("baton:kv_transfer_transfers_failed_total") == 1


async def hand_off(prefill: Pod, decode: Pod, decode_key: ServiceKey | None) -> list[int]:
    """Hand a prompt over from `prefill` to `decode`, through a client that both accept."""
    prompt, transfer_id = list(range(100)), uuid.uuid4().hex
    async with engine_client(prefill, KEY) as one, engine_client(decode, decode_key) as two:
        consume = KVTransferParams(
            KVSide.CONSUME, transfer_id, one.instance_id, prefill.address, KV_PORT
        )
        produce = KVTransferParams(KVSide.PRODUCE, transfer_id, two.instance_id)
        stream = two.add(EngineCoreRequest("r", prompt, greedy(8), kv_transfer=consume))
        first = await generate(one, EngineCoreRequest("r", prompt, greedy(1), kv_transfer=produce))
        two.prefill_result(PrefillResult("r", token_ids=first))
        rest = list(first)
        async with asyncio.timeout(DEADLINE_S):
            async for output in stream:
                assert not output.error, output.error
                assert output.token_offset == len(rest)
                rest += output.new_token_ids
    return rest


async def test_the_same_hand_off_with_the_key_transfers_the_kv(service: Service) -> None:
    before = service.decode.metric("baton:prompt_tokens_remote_total")
    assert len(await hand_off(service.prefill, service.decode, KEY)) == 8
    assert service.decode.metric("baton:prompt_tokens_remote_total") > before


# The gateway's side


@pytest.mark.parametrize("attacker", ["no key", "another key"])
def test_a_gateway_without_the_key_warns_once_and_retries_with_backoff(
    service: Service, tmp_path: Path, attacker: str
) -> None:
    key_file = write_key(tmp_path, attacker)
    with pods(tmp_path, 33) as group:
        engines = {service.prefill: "prefill", service.decode: "decode"}
        gateway = group.gateway("untrusted", service.checkpoint, engines, service_key_file=key_file)
        before = num_refused(service.decode, "engine")

        def has_retried() -> bool:
            return num_refused(service.decode, "engine") >= before + 5

        eventually(has_retried, timeout_s=DEADLINE_S, what="five attempts of the gateway")
        log = gateway.log.read_text()
        for pod in engines:
            warnings = [
                line
                for line in log.splitlines()
                if "WARNING" in line and f"engine {pod.name} " in line
            ]
            assert len(warnings) == 1, log
            assert "service key" in warnings[0]
        assert gateway.get(GATEWAY_PORT, "/ready")[0] == 503
        # Backoff of 0.1, 0.2, 0.4 ... 3 s. Without it there would be thousands of attempts.
        assert num_refused(service.decode, "engine") < before + 20


# File descriptors


@pytest.mark.parametrize("attacker", [*ATTACKERS, "silence"])
async def test_two_hundred_connections_of_attackers_leave_no_file_descriptor(
    service: Service, attacker: str
) -> None:
    await complete(service.url, list(range(20)), 4)
    before = {pod: num_descriptors(pod) for pod in service.engines}
    ports = [
        (service.prefill, ENGINE_PORT),
        (service.prefill, KV_PORT),
        (service.decode, ENGINE_PORT),
    ]
    async with service.serving():
        with contextlib.ExitStack() as stack, zmq.Context() as context:
            context.linger = 0
            context.set(zmq.MAX_SOCKETS, 4096)
            for number in range(200):
                pod, port = ports[number % len(ports)]
                if attacker == "silence":  # a TCP connection without any bytes
                    stack.enter_context(socket.create_connection((pod.address, port), timeout=10))
                    continue
                dealer = stack.enter_context(context.socket(zmq.DEALER))
                dealer.setsockopt(zmq.RECONNECT_IVL, -1)
                if (key := ATTACKERS[attacker]) is not None:
                    key.protect_client(dealer)
                dealer.connect(f"tcp://{pod.address}:{port}")

            def are_closed() -> bool:
                now = {pod: num_descriptors(pod) for pod in before}
                left = {
                    pod.name: now[pod] - before[pod]
                    for pod in before
                    if now[pod] > before[pod] + SPARE
                }
                assert not left, f"additional descriptors: {left}"
                return True

            # The attackers' connections are still open.
            await asyncio.to_thread(
                eventually, are_closed, timeout_s=DEADLINE_S, what="closed descriptors"
            )
    for pod in service.engines:
        assert pod.process.poll() is None
