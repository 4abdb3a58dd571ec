"""`baton serve MODEL`: one engine and its gateway as child processes, without Kubernetes.

A model that is not a local folder is first downloaded into a cache, in a child process as well.

The engine and the metrics listen on 127.0.0.1, and the gateway on --host. The gateway discovers the
engine through a file in a private temporary folder. The folder also holds a service key, without
which other users of the machine, and web pages, cannot control the engine or send it requests.

The child processes end when this process ends, even if it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import shlex
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec

from baton_engine.fetch.cached_model import GIVE_UP_AFTER_S, CachedModel, find_cached_model
from baton_local.serve.child_process import ChildEndedError, ChildProcess, print_message
from baton_local.serve.flags import RESERVED_FLAGS, flags_parser
from baton_protocol.options.config import (
    AccessConfig,
    DiscoveryConfig,
    EngineEndpoint,
    EngineEndpoints,
    GatewayConfig,
    ModelConfig,
)
from baton_protocol.process.fatal import ConfigurationError, report_fatal
from pocketkube.ports import LOOPBACK, free_ports
from pocketkube.private_files import write_private

POLL_S = 0.2  # interval of the requests to /ready and /metrics
#: Interval between messages while the engine or the gateway is not ready.
PROGRESS_S = 5.0
#: Time for a child to end after its own drain timeout, before SIGKILL.
_EXIT_GRACE_S = 10.0
#: Time for the gateway to notice that the engine has ended.
_NOTICE_S = 2.0


def run_serve(model: str, flags: list[str]) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C, and return the exit code.

    The exit code is 0 after a drain. If a child process exits with an error, its exit code is
    returned, for example 78 for an invalid configuration. After any other failure, for example if a
    signal has killed a child process, the exit code is 1.

    Args:
        model: the checkpoint folder, or a name or URI that `find_cached_model` accepts.
        flags: the command line after the model.
    """
    parser = flags_parser()
    if {"-h", "--help"} & set(flags):
        parser.print_help()
        print("\nAll other flags are the engine's: see baton-engine --help.")
        return 0
    options, engine_flags = parser.parse_known_args(flags)
    for flag in engine_flags:
        if flag.split("=", 1)[0] in RESERVED_FLAGS:
            parser.error(f"{flag.split('=', 1)[0]} cannot be given: baton serve sets it")
    try:
        cached = find_cached_model(model, options.revision, options.download_dir)
    except ValueError as error:
        parser.error(str(error))
    except ConfigurationError as error:
        return report_fatal(error.reason, error.message)
    try:
        options.port = _free_port(options.host, options.port, "--host and --port")
        options.metrics_port = _free_port(LOOPBACK, options.metrics_port, "--metrics-port")
    except OSError as error:
        print_message(str(error))
        return 1
    with tempfile.TemporaryDirectory(prefix="baton-serve-") as folder:
        server = _Server(cached or model, options, engine_flags, Path(folder))
        return asyncio.run(server.run())


class _Server:
    """Runs the engine and the gateway, from the download of the model to the drain."""

    def __init__(
        self,
        model: CachedModel | str,
        options: argparse.Namespace,
        engine_flags: list[str],
        folder: Path,
    ) -> None:
        if isinstance(model, CachedModel):
            self._model, name = str(model.folder), model.name
        else:
            self._model, name = model, Path(model).resolve().name
        self._cached = model if isinstance(model, CachedModel) else None
        self._name = options.served_model_name or name
        self._options = options
        self._engine_flags = engine_flags
        self._folder = folder
        self._service_key_file = folder / "service.key"
        self._children: list[ChildProcess] = []
        self._stop = asyncio.Event()
        self._second_signal = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal)
        stopped = asyncio.create_task(self._stop.wait())
        serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait([stopped, serving], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                await self._drain()
                return 0
            serving.result()
        except ChildEndedError as error:
            await self._fail(error)
            return error.code if error.code > 0 else 1
        except TimeoutError as error:
            print_message(str(error))
            return 1
        finally:
            stopped.cancel()
            for child in self._children:
                child.kill()
                await child.wait()
        return 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._second_signal.set()
        self._stop.set()

    async def _serve(self) -> None:
        """Download the model, and run the engine and the gateway until this task is cancelled.

        Raises:
            ChildEndedError: a child has ended.
            TimeoutError: the engine or the gateway was not ready in time.
        """
        if self._cached is not None:
            await self._fetch(self._cached)
        write_private(self._service_key_file, secrets.token_hex(32).encode())
        engine_port, http_port = free_ports(2)
        engine = await self._start_engine(engine_port, http_port)
        gateway = await self._start_gateway(engine_port)
        watch = [asyncio.create_task(_until_ended(child)) for child in (engine, gateway)]
        ready = asyncio.create_task(self._until_ready(http_port))
        try:
            await _first_of(*watch, ready)
            self._announce()
            await _first_of(*watch)
        finally:
            for task in (*watch, ready):
                task.cancel()
            await asyncio.gather(*watch, ready, return_exceptions=True)

    async def _fetch(self, model: CachedModel) -> None:
        """Download the model unless its folder is complete.

        Raises:
            ChildEndedError: the model cannot be downloaded.
        """
        command = [
            *(sys.executable, "-P", "-m", "baton_engine.fetch.command", "fetch"),
            *("--uri", model.uri, "--to", str(model.folder)),
            *("--give-up-after", str(GIVE_UP_AFTER_S)),
        ]
        child = await ChildProcess.start("download", command, {})
        self._children.append(child)
        if code := await child.wait():
            print_message(model.advice)
            raise ChildEndedError(child, code)
        self._children.remove(child)

    async def _start_engine(self, engine_port: int, http_port: int) -> ChildProcess:
        command = [
            *(sys.executable, "-P", "-m", "baton_engine.cli"),
            *("--model", self._model, "--served-model-name", self._name),
            *("--engine-port", str(engine_port), "--http-port", str(http_port)),
            *("--service-key-file", str(self._service_key_file)),
            *("--drain-timeout-s", str(self._options.drain_timeout_s)),
            *self._engine_flags,
        ]
        child = await ChildProcess.start("engine", command, {"POD_IP": LOOPBACK})
        self._children.append(child)
        return child

    async def _start_gateway(self, engine_port: int) -> ChildProcess:
        endpoint = EngineEndpoint(
            name="engine", role="decode", host=LOOPBACK, engine_port=engine_port
        )
        discovery = self._folder / "engines.json"
        discovery.write_bytes(msgspec.json.encode(EngineEndpoints(engines=[endpoint])))
        config = GatewayConfig(
            model=ModelConfig(path=self._model, served_name=self._name),
            discovery=DiscoveryConfig(file=str(discovery)),
            access=AccessConfig(
                allowed_origins=tuple(self._options.allowed_origins),
                min_priority=self._options.min_priority,
            ),
            port=self._options.port,
            metrics_port=self._options.metrics_port,
            metrics_host=LOOPBACK,
            service_key_file=str(self._service_key_file),
            drain_timeout_s=self._options.drain_timeout_s,
            drain_quiet_s=0.0,  # there is no other gateway for new requests
        )
        for name in ("max_concurrent_requests", "generation_config", "request_timeout_s"):
            if (value := getattr(self._options, name)) is not None:
                config = msgspec.structs.replace(config, **{name: value})
        path = self._folder / "gateway.json"
        path.write_bytes(msgspec.json.encode(config))
        command = [sys.executable, "-P", "-m", "baton_gateway.cli", "--config", str(path)]
        child = await ChildProcess.start("gateway", command, {"POD_IP": self._options.host})
        self._children.append(child)
        return child

    async def _until_ready(self, http_port: int) -> None:
        timeout_s, started = self._options.ready_timeout_s, time.monotonic()
        printed, printed_at = "", started
        engine_url, gateway_url = f"http://{LOOPBACK}:{http_port}/ready", f"{self._url}/ready"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while True:
                waiting = await _not_ready(session, engine_url, "engine") or await _not_ready(
                    session, gateway_url, "gateway"
                )
                if not waiting:
                    return
                now = time.monotonic()
                if now - started > timeout_s:
                    raise TimeoutError(
                        f"not ready within {timeout_s:g} s ({waiting}); see --ready-timeout-s"
                    )
                if waiting != printed or now - printed_at > PROGRESS_S:
                    printed, printed_at = waiting, now
                    print_message(f"{now - started:.0f} s: {waiting}")
                await asyncio.sleep(POLL_S)

    @property
    def _url(self) -> str:
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self._options.host, self._options.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._options.port}"

    def _announce(self) -> None:
        body = {
            "model": self._name,
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 32,
        }
        print_message(f"ready: {self._url}/v1 serves {self._name}")
        data = shlex.quote(json.dumps(body))
        print(
            f"curl {self._url}/v1/chat/completions -H 'Content-Type: application/json' -d {data}",
            flush=True,
        )

    async def _drain(self) -> None:
        """End the gateway, then the engine.

        The gateway first finishes the running requests. A second SIGTERM, SIGHUP or Ctrl-C kills
        both processes immediately.
        """
        print_message("stopping after the running requests; press Ctrl-C again to stop at once")
        ending = asyncio.create_task(self._end_children())
        second = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait([ending, second], return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        if not ending.done():
            for child in self._children:
                child.kill()
        await ending

    async def _end_children(self) -> None:
        for child in reversed(self._children):
            await child.end(self._options.drain_timeout_s + _EXIT_GRACE_S)

    async def _fail(self, error: ChildEndedError) -> None:
        """End all child processes after a child has failed, and print the failure.

        If the engine has failed, the gateway first gets time to send the error to waiting clients.
        """
        await self._until_noticed()
        for child in reversed(self._children):
            # The second signal ends the gateway's drain, because its requests cannot continue.
            child.signal(signal.SIGTERM)
            await asyncio.sleep(0)
            child.signal(signal.SIGINT)
        for child in reversed(self._children):
            await child.end(_EXIT_GRACE_S)
        if error.code > 0 and error.child.last_line.startswith("FATAL "):
            print(error.child.last_line, file=sys.stderr, flush=True)
        else:
            print_message(f"{error}; its last line: {error.child.last_line or '(none)'}")

    async def _until_noticed(self) -> None:
        """Wait until the gateway's metrics show no ready engine, for at most _NOTICE_S seconds.

        Return at once if the gateway does not answer.
        """
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(_NOTICE_S), aiohttp.ClientSession() as session:
                while True:
                    async with session.get(
                        f"http://{LOOPBACK}:{self._options.metrics_port}/metrics"
                    ) as response:
                        if 'baton:engines_ready{role="decode"} 0.0' in await response.text():
                            return
                    await asyncio.sleep(POLL_S)


async def _first_of(*tasks: asyncio.Task[None]) -> None:
    """Wait until one of the tasks ends. If a task has failed, raise its error."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()


async def _until_ended(child: ChildProcess) -> None:
    """Wait until `child` ends, and raise an error.

    Raises:
        ChildEndedError: the child has ended, with any exit code.
    """
    raise ChildEndedError(child, await child.wait())


async def _not_ready(session: aiohttp.ClientSession, url: str, name: str) -> str:
    """Return why the component at `url` is not ready; empty if the component is ready."""
    try:
        async with session.get(url) as response:
            if response.status == 200:
                return ""
            body = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return f"the {name} is starting"
    try:
        answer = json.loads(body)
        return f"{name}: {answer.get('message') or answer['error']['message']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{name}: HTTP {response.status}"


def _free_port(host: str, port: int, flags: str) -> int:
    """Return `port` if no process listens on it. If `port` is 0, return a free port.

    Raises:
        OSError: the port is in use, or `host` is not an address of this machine. The message refers
            to `flags`, the command-line flags that set the host and the port.
    """
    try:
        if port == 0:
            [port] = free_ports(1, host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            # A port counts as free if only closed connections in TIME_WAIT still use it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return probe.getsockname()[1]
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; see {flags}") from error
