"""A gateway over scripted engines: its discovery file, its engines and its clients.

For the tests of the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
import openai
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton_gateway.routing.discovery import ROLES
from baton_gateway.routing.file_discovery import FileDiscovery
from baton_gateway.server import Gateway
from baton_protocol.options.config import (
    DiscoveryConfig,
    EngineEndpoint,
    EngineEndpoints,
    GatewayConfig,
    ModelConfig,
)
from baton_text.generation_defaults import GenerationDefaults
from baton_text.tokenizer import Tokenizer
from support.gateway.fake_engine import DEADLINE_S, EOS_ID, FakeEngine
from support.waiting import until

#: Tokens of the tokenizer that `save_tokenizer` trains.
VOCAB_SIZE = 320
#: The option `timeout` of a request that `GatewayRig.skip` must not end.
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


def save_tokenizer(folder: Path, template: str) -> None:
    """Train a byte-level BPE tokenizer, and save it and a chat template as a checkpoint does."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["hello world, the quick brown fox says hello to the world"] * 8, trainer
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<pad>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def http_session() -> aiohttp.ClientSession:
    """Return a session whose requests time out."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S))


def openai_client(url: str) -> openai.AsyncOpenAI:
    """Return an OpenAI client of the gateway at `url`, without retries."""
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
    )


class GatewayRig:
    """A gateway, its discovery file and its engines."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults | None = None,
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
                "metrics_port": 0,
                "drain_timeout_s": 5.0,
                "resume_wait_s": 3.0,
                "queue_wait_s": 0.5,
                **config,
            },
        )
        self.gateway = Gateway(
            self.config, tokenizer, FileDiscovery(self.file), defaults or GenerationDefaults()
        )
        self.url = ""
        #: Address of /metrics.
        self.metrics_url = ""
        self._clients: list[openai.AsyncOpenAI] = []

    def engine(self, name: str, role: str, text: str = "hello world", **options: Any) -> FakeEngine:
        """Start an engine that responds to every request with `text`."""
        answer = self.tokenizer.encode(text, add_special_tokens=False)
        engine = FakeEngine(name, role, answer, **options)
        self.engines.append(engine)
        return engine

    def answering(self, text: str, name: str = "d", **options: Any) -> FakeEngine:
        """Start a decode engine that answers with `text` and EOS."""
        engine = self.engine(name, "decode", text, **options)
        engine.answer.append(EOS_ID)
        return engine

    def announce(self, *engines: FakeEngine) -> None:
        """Write exactly these engines into the discovery file."""
        self.announce_endpoints(*(engine.endpoint for engine in engines))

    def announce_endpoints(self, *endpoints: EngineEndpoint) -> None:
        self.file.write_bytes(msgspec.json.encode(EngineEndpoints(engines=list(endpoints))))

    async def start(self, *engines: FakeEngine) -> None:
        """Announce `engines`, start the gateway, and wait until it is connected to all engines."""
        self.announce(*engines)
        port = await self.gateway.start("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{self.gateway.metrics_port}"
        await self.connected(*engines)

    async def connected(self, *engines: FakeEngine) -> None:
        """Wait until exactly these engines are available in the gateway."""
        wanted = {engine.instance_id for engine in engines}

        def are_available() -> bool:
            members = self.gateway.pool.available("prefill") + self.gateway.pool.available("decode")
            return {member.ready_client.instance_id for member in members} == wanted

        await until(are_available, f"engines {[engine.name for engine in engines]} connected")

    def client(self) -> openai.AsyncOpenAI:
        """Return an OpenAI client. `close()` closes the client."""
        client = openai_client(self.url)
        self._clients.append(client)
        return client

    async def post(
        self, path: str, body: Any, **options: Any
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """POST `body`, as JSON unless it is bytes. Return the status, JSON body and headers."""
        options |= {"data": body} if isinstance(body, bytes) else {"json": body}
        async with http_session() as session, session.post(self.url + path, **options) as response:
            return response.status, await response.json(), dict(response.headers)

    async def refused(self, path: str, body: object, status: int = 400) -> dict[str, str]:
        """POST a body that must be refused before it reaches an engine. Return the error."""
        got, answer, _ = await self.post(path, body)
        assert got == status, answer
        error: dict[str, str] = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert not any(engine.adds for engine in self.engines), "a refused request was run"
        return error

    async def completion(self, **fields: Any) -> dict[str, Any]:
        """Return the JSON response to a completion of the prompt "go"."""
        body = {"model": "m", "prompt": "go", "max_tokens": 50, **fields}
        status, response, _ = await self.post("/v1/completions", body)
        assert status == 200, response
        return response

    async def complete(self, **options: Any) -> str:
        """Return the text of a completion of the prompt "go"."""
        fields = {"model": "m", "prompt": "go", "max_tokens": 50, **options}
        return (await self.client().completions.create(**fields)).choices[0].text

    @contextlib.asynccontextmanager
    async def slow_connection(self, path: str, body: Any) -> AsyncIterator[socket.socket]:
        """Send a POST without reading the response. Yield the connection, with a small buffer."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(DEADLINE_S)
            connection.connect(("127.0.0.1", int(self.url.rsplit(":", 1)[1])))
            await asyncio.to_thread(connection.sendall, head.encode() + content)
            yield connection

    async def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """Return the chunks of a streamed response to `body`, without the final [DONE]."""
        async with http_session() as session, session.post(self.url + path, json=body) as response:
            events = [
                event.removeprefix("data: ")
                for event in (await response.text()).split("\n\n")
                if event
            ]
            assert events[-1] == "[DONE]", events[-1]
            return [msgspec.json.decode(event) for event in events[:-1]]

    async def skip(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Advance the event loop's clock, and wait for a few heartbeats after that.

        Requests that run during this time need NO_TIMEOUT.
        """
        loop = asyncio.get_running_loop()
        clients = [
            member.ready_client for role in ROLES for member in self.gateway.pool.available(role)
        ]
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + seconds)
        seen = [client.status.sequence for client in clients]
        await until(
            lambda: all(
                client.status.sequence > sequence + 3
                for client, sequence in zip(clients, seen, strict=True)
            ),
            "PONGs after the skipped time",
        )

    async def get(self, path: str) -> tuple[int, str]:
        async with http_session() as session, session.get(self.url + path) as response:
            return response.status, await response.text()

    async def scrape(self) -> str:
        """Return the response to GET /metrics."""
        async with http_session() as session, session.get(f"{self.metrics_url}/metrics") as got:
            assert got.status == 200
            return await got.text()

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.gateway.stop()
        for engine in self.engines:
            engine.die()


class MakeRig(Protocol):
    """Makes a rig. `config` has fields of the gateway's configuration."""

    def __call__(self, **config: Any) -> GatewayRig: ...
