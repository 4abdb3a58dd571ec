"""Processes without a service's key knock at its running engines while these serve: they get nothing and change nothing.

Three kinds: without any key, with another service's, and one that has learned the servers' public key. They use our own clients,
so what they say would be understood if it were heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from baton_kv_transfer import auth, side_channel
from baton_protocol.client import EngineClient, EngineDeadError
from baton_protocol.config import (
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    GATEWAY_PORT,
    KV_PORT,
    KVRole,
    KVTransferConfig,
)
from baton_protocol.messages import (
    PROTOCOL_VERSION,
    EngineCoreRequest,
    EngineCoreRequestType,
    Hello,
    KVSide,
    KVTransferParams,
    PrefillResult,
    UtilityRequest,
)
from baton_protocol.sampling import SamplingParams
from baton_protocol.service_key import ServiceKey
from support.integration.completions import VOCAB, complete, generate
from support.parity import prompts
from support.pods import Pod, Pods, pods
from support.waiting import eventually

KEY_TEXT = "5e" * 32
KEY = ServiceKey(KEY_TEXT.encode())
DEADLINE_S = 60.0
SPARE = 4
"""Descriptors that metrics and users' requests need for a moment."""
SILENCE_S = 1.0
"""So long a stranger waits for an answer that must not come; ours come within milliseconds."""


class WithPublicKey(ServiceKey):
    """Has seen the servers' public key, and nothing else."""

    def __init__(self) -> None:
        super().__init__(b"a key that the attacker made up")

    def protect_client(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_serverkey = KEY._curve_keys("server")[0]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


STRANGERS: dict[str, ServiceKey | None] = {
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

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}:{GATEWAY_PORT}/v1"

    @property
    def engines(self) -> tuple[Pod, Pod]:
        return self.prefill, self.decode

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Meanwhile users' requests run, one after the other in two lanes; afterwards they were all answered, by hand-off."""
        stop = asyncio.Event()
        answered = 0

        async def lane(seed: int) -> None:
            nonlocal answered
            serial = 0
            while not stop.is_set() or not answered:
                serial += 1
                (prompt,) = prompts(1, VOCAB, longest=100, seed=seed + serial)
                assert len(await complete(self.url, prompt, 16)) == 16
                answered += 1

        lanes = [asyncio.create_task(lane(1000 * (int(time.monotonic()) + n))) for n in range(2)]
        moved = self.decode.metric("baton:kv_transfer_bytes_received_total")
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*lanes)
        assert self.decode.metric("baton:kv_transfer_bytes_received_total") > moved
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
        loads = KVTransferConfig(
            role=KVRole.CONSUMER, mode="push", lease_s=10.0, load_timeout_s=10.0
        )
        decode = group.engine("decode", checkpoint, kv_transfer=loads, service_key_file=key_file)
        engines = {prefill: "prefill", decode: "decode"}
        gateway = group.gateway("gateway", checkpoint, engines, service_key_file=key_file)
        for pod in engines:
            pod.wait_ready(ENGINE_HTTP_PORT, DEADLINE_S)
        gateway.wait_ready(GATEWAY_PORT, DEADLINE_S)
        yield Service(group, checkpoint, prefill, decode, gateway)


def refused(pod: Pod, door: str) -> float:
    _, body = pod.get(ENGINE_HTTP_PORT, "/metrics")
    (line,) = [
        line
        for line in body.splitlines()
        if line.startswith(f'baton:access_refused_total{{door="{door}"}}')
    ]
    return float(line.split()[-1])


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


# The engines' ROUTER: work and utility calls


@pytest.mark.parametrize("who", STRANGERS)
async def test_an_engine_does_not_take_a_stranger_for_a_client(service: Service, who: str):
    async with service.serving():
        for pod in service.engines:
            before = refused(pod, "engine")
            client = EngineClient(
                pod.address, ENGINE_PORT, client_id="stranger", service_key=STRANGERS[who]
            )
            with pytest.raises(EngineDeadError, match=r"cannot connect: tcp://.*"):
                await client.connect(DEADLINE_S)
            await asyncio.to_thread(
                eventually,
                lambda pod=pod, before=before: refused(pod, "engine") > before,
                timeout_s=DEADLINE_S,
                what=f"{pod.name} counts the stranger",
            )
            assert "client stranger connected" not in pod.log.read_text()


@pytest.mark.parametrize("who", STRANGERS)
async def test_work_that_a_stranger_sends_without_asking_is_never_done(service: Service, who: str):
    """Not even if it knows the instance id and does not wait for any answer."""
    request_id = f"stolen-{uuid.uuid4().hex}"
    for pod in service.engines:
        async with EngineClient(
            pod.address, ENGINE_PORT, client_id="friend", service_key=KEY
        ) as friend:
            await friend.connect(DEADLINE_S)
            await friend.wait_ready(DEADLINE_S)
            before = pod.metric("baton:generation_tokens_total")
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                if (key := STRANGERS[who]) is not None:
                    key.protect_client(dealer)
                dealer.connect(f"tcp://{pod.address}:{ENGINE_PORT}")
                for kind, payload in (
                    (EngineCoreRequestType.HELLO, Hello(PROTOCOL_VERSION, "thief", kv_events=True)),
                    (
                        EngineCoreRequestType.ADD,
                        EngineCoreRequest(request_id, list(range(50)), greedy(5)),
                    ),
                    (EngineCoreRequestType.ABORT, None),
                    (EngineCoreRequestType.UTILITY, UtilityRequest(1, "pause", ["abort"])),
                    (EngineCoreRequestType.UTILITY, UtilityRequest(2, "sleep", [2])),
                ):
                    with contextlib.suppress(zmq.Again):  # turned away already
                        parts = [
                            kind.value,
                            friend.instance_id.encode(),
                            msgspec.msgpack.encode(payload),
                        ]
                        dealer.send_multipart(parts, zmq.NOBLOCK)
                assert not await asyncio.to_thread(dealer.poll, int(SILENCE_S * 1000))
            assert pod.metric("baton:generation_tokens_total") == before
            assert await friend.call("is_paused") is False
            assert await friend.call("is_sleeping") is False
            assert (
                len(
                    await generate(
                        friend, EngineCoreRequest(uuid.uuid4().hex, [1, 2, 3], greedy(4))
                    )
                )
                == 4
            )
        assert request_id not in pod.log.read_text()
        assert "thief" not in pod.log.read_text()


# HTTP: what changes something


@pytest.mark.parametrize(
    "authorization", [None, "Bearer", f"Bearer {KEY_TEXT}", STRANGERS["another key"].bearer]
)  # type: ignore[union-attr]
async def test_admin_requests_of_strangers_change_nothing(
    service: Service, authorization: str | None
):
    async with service.serving():
        for pod in service.engines:
            before = refused(pod, "http")
            paths = [
                "/drain",
                "/pause?mode=abort",
                "/sleep?level=2",
                "/reset_prefix_cache",
                "/start_profile",
            ]
            for path in paths:
                assert await asyncio.to_thread(post, pod, path, authorization) == 401
            assert refused(pod, "http") == before + len(paths)
            assert pod.get(ENGINE_HTTP_PORT, "/drain")[1].startswith('{"draining":false')
            for open_path in ("/health", "/ready", "/metrics"):
                assert pod.get(ENGINE_HTTP_PORT, open_path)[0] == 200


def test_the_gateway_changes_nothing_for_anyone(service: Service):
    """It has no admin requests at all: whoever may use the service can ask for text, and no more."""
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


@pytest.mark.parametrize("who", STRANGERS)
async def test_the_kv_side_channel_does_not_speak_with_strangers(service: Service, who: str):
    """They know the protocol, the instance id and the compatibility hash, and hear not even WELCOME."""
    async with EngineClient(
        service.prefill.address, ENGINE_PORT, client_id="friend", service_key=KEY
    ) as friend:
        init = await friend.connect(DEADLINE_S)
    hello = side_channel.Hello(
        side_channel.VERSION, init.config_hash, "D", init.instance_id, auth.new_nonce()
    )
    before = service.prefill.metric("baton:kv_transfer_handshakes_refused_total")

    def counted() -> bool:
        return service.prefill.metric("baton:kv_transfer_handshakes_refused_total") > before

    async with service.serving():
        with zmq.Context() as context:
            context.linger = 0
            for key, hears in ((STRANGERS[who], False), (KEY, True)):
                with context.socket(zmq.DEALER) as dealer:
                    if key is not None:
                        key.protect_client(dealer)
                    dealer.connect(f"tcp://{service.prefill.address}:{KV_PORT}")
                    with contextlib.suppress(zmq.Again):
                        dealer.send(side_channel.encode(hello), zmq.NOBLOCK)
                    timeout_s = DEADLINE_S if hears else SILENCE_S
                    assert (
                        bool(await asyncio.to_thread(dealer.poll, int(timeout_s * 1000))) == hears
                    )
                    if hears:
                        assert isinstance(
                            side_channel.decode_to_consumer(dealer.recv()), side_channel.Welcome
                        )
        await asyncio.to_thread(
            eventually, counted, timeout_s=DEADLINE_S, what="the refusal is counted"
        )


@pytest.mark.parametrize("who", ["no key", "another key"])
async def test_an_engine_of_another_service_gets_no_kv(service: Service, tmp_path: Path, who: str):
    """A whole decode engine, asked to fetch a prompt's KV from this service: it computes the prompt itself, and says why."""
    key_file = ""
    if who == "another key":
        (tmp_path / "key").write_text("another service's key")
        key_file = str(tmp_path / "key")
    loads = KVTransferConfig(role=KVRole.CONSUMER, mode="pull", lease_s=10.0, load_timeout_s=10.0)
    with pods(tmp_path, 32) as group:
        thief = group.engine(
            "thief", service.checkpoint, kv_transfer=loads, service_key_file=key_file
        )
        thief.wait_ready(ENGINE_HTTP_PORT, DEADLINE_S)
        async with service.serving():
            assert len(await hand_off(service.prefill, thief, ServiceKey.load(key_file))) == 8
        assert thief.metric("baton:prompt_tokens_remote_total") == 0
        assert thief.metric("baton:kv_transfer_bytes_received_total") == 0
        assert thief.metric("baton:kv_transfer_transfers_failed_total") == 1


async def hand_off(prefill: Pod, decode: Pod, decode_key: ServiceKey | None) -> list[int]:
    """A prompt that `prefill` computes and `decode` goes on with, told so by someone whom both let in."""
    prompt, transfer_id = list(range(100)), uuid.uuid4().hex
    async with (
        EngineClient(prefill.address, ENGINE_PORT, client_id="a", service_key=KEY) as one,
        EngineClient(decode.address, ENGINE_PORT, client_id="b", service_key=decode_key) as two,
    ):
        for client in (one, two):
            await client.connect(DEADLINE_S)
            await client.wait_ready(DEADLINE_S)
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


async def test_with_the_key_the_same_hand_off_brings_the_kv(service: Service):
    before = service.decode.metric("baton:prompt_tokens_remote_total")
    assert len(await hand_off(service.prefill, service.decode, KEY)) == 8
    assert service.decode.metric("baton:prompt_tokens_remote_total") > before


# The gateway's side


@pytest.mark.parametrize("who", ["no key", "another key"])
def test_a_gateway_without_the_key_says_so_once_and_tries_again_in_peace(
    service: Service, tmp_path: Path, who: str
):
    key_file = ""
    if who == "another key":
        (tmp_path / "key").write_text("another service's key")
        key_file = str(tmp_path / "key")
    with pods(tmp_path, 33) as group:
        engines = {service.prefill: "prefill", service.decode: "decode"}
        gateway = group.gateway("stranger", service.checkpoint, engines, service_key_file=key_file)
        before = refused(service.decode, "engine")

        def tried_often() -> bool:
            return refused(service.decode, "engine") >= before + 5

        eventually(tried_often, timeout_s=DEADLINE_S, what="five attempts of the gateway")
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
        # With backoff: 0.1 + 0.2 + 0.4 + ... s, 3 s at most between attempts; without it there would be thousands by now.
        assert refused(service.decode, "engine") < before + 20


# Descriptors


@pytest.mark.parametrize("who", [*STRANGERS, "silence"])
async def test_two_hundred_connections_of_strangers_leave_nothing_behind(
    service: Service, who: str
):
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
                if who == "silence":  # TCP, and then nothing
                    stack.enter_context(socket.create_connection((pod.address, port), timeout=10))
                    continue
                dealer = stack.enter_context(context.socket(zmq.DEALER))
                dealer.setsockopt(zmq.RECONNECT_IVL, -1)
                if (key := STRANGERS[who]) is not None:
                    key.protect_client(dealer)
                dealer.connect(f"tcp://{pod.address}:{port}")

            def gone() -> bool:
                now = {pod: num_descriptors(pod) for pod in before}
                left = {
                    pod.name: now[pod] - before[pod]
                    for pod in before
                    if now[pod] > before[pod] + SPARE
                }
                assert not left, f"descriptors more than before: {left}"
                return True

            # While the strangers still hold their ends open.
            await asyncio.to_thread(
                eventually, gone, timeout_s=DEADLINE_S, what="descriptors given back"
            )
    for pod in service.engines:
        assert pod.process.poll() is None
