"""Run engines, gateways and coordinators as processes, each with an address and a log file.

For the tests of several processes, and for benchmarks.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from baton_protocol.options.config import (
    AccessConfig,
    CacheConfig,
    DiscoveryConfig,
    EngineConfig,
    EngineEndpoint,
    EngineEndpoints,
    GatewayConfig,
    KVRole,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from support.waiting import eventually

BIN = Path(sys.executable).parent
#: The KV transport of engines in chaos and hand-off tests.
KV_TRANSPORT = os.environ.get("BATON_TEST_KV_TRANSPORT", KVTransferConfig().transport)


@dataclass(frozen=True)
class Network:
    """A network namespace for a pod, other than the test's namespace."""

    address: str
    #: The prefix of the pod's command line.
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


class Pod:
    """One process with its own address and log file."""

    def __init__(
        self,
        folder: Path,
        name: str,
        address: str,
        command: list[str],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.log = folder / f"{name}.log"
        self._command = command
        self._environment = environment or {}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, "POD_IP": self.address, "POD_NAME": self.name, "OMP_NUM_THREADS": "1"}
        env |= self._environment
        with open(self.log, "ab") as log:
            return subprocess.Popen(self._command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def restart(self) -> None:
        self.process = self._start()

    def get(self, port: int, path: str) -> tuple[int, str]:
        """Return the HTTP status and the body. The status is 0 if the connection fails."""
        try:
            with urllib.request.urlopen(
                f"http://{self.address}:{port}{path}", timeout=5
            ) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, name: str, port: int = 8000) -> float:
        """Return the sum of all samples of the metric `name`."""
        return self.metrics(name, port=port)[0]

    def metrics(self, *names: str, port: int = 8000) -> list[float]:
        """Return `metric` of each name, all from one request.

        A flood of requests gets the same metrics, see `baton_protocol.process.metrics_text`.
        """
        _, body = self.get(port, "/metrics")
        samples: dict[str, list[float]] = {}
        for line in body.splitlines():
            if line and not line.startswith("#"):
                name = re.split("[{ ]", line, maxsplit=1)[0]
                samples.setdefault(name, []).append(float(line.split()[-1]))
        assert set(names) <= set(samples), f"{self.name} has no metric {set(names) - set(samples)}"
        return [sum(samples[name]) for name in names]

    def wait_ready(self, port: int, timeout_s: float = 180.0) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.tail()}"
            status, body = self.get(port, "/ready")
            assert status == 200, f"{status} {body}\n{self.tail()}"
            return True

        eventually(ready, timeout_s=timeout_s, what=f"{self.name} ready")

    def wait_open(self, port: int) -> None:
        """Wait until the process accepts connections at the port."""

        def is_open() -> bool:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.tail()}"
            with contextlib.suppress(OSError):
                socket.create_connection((self.address, port), 5).close()
                return True
            return False

        eventually(is_open, timeout_s=180.0, what=f"{self.name} at port {port}")

    def kill(self, signum: int = signal.SIGKILL) -> int:
        self.process.send_signal(signum)
        return self.process.wait(timeout=60)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Pods:
    """Starts pods, whose files are in one folder. `close()` kills all pods."""

    def __init__(self, folder: Path, subnet: int) -> None:
        self._folder = folder
        self._subnet = subnet
        self._pods: list[Pod] = []

    def _address(self) -> str:
        # The pid gives concurrent test runs different addresses.
        return f"127.{100 + self._subnet % 50}.{os.getpid() % 250 + 1}.{len(self._pods) + 1}"

    def coordinator(
        self,
        name: str = "coordinator",
        service_key_file: str = "",
        flags: Sequence[str] = (),
    ) -> Pod:
        """Start the coordinator of an expert-parallel group."""
        key = ["--service-key-file", service_key_file] if service_key_file else []
        return self._start(name, [str(BIN / "baton-coordinator"), *key, *flags])

    def script(self, name: str, module: str, *arguments: str) -> Pod:
        """Run a module of `tests/support` as a script."""
        environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
        return self._start(
            name, [sys.executable, "-m", module, *arguments], environment=environment
        )

    def _run(
        self, name: str, command: str, config: msgspec.Struct, network: Network | None = None
    ) -> Pod:
        path = self._folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode(config))
        return self._start(name, [str(BIN / command), "--config", str(path)], network)

    def _start(
        self,
        name: str,
        line: list[str],
        network: Network | None = None,
        environment: dict[str, str] | None = None,
    ) -> Pod:
        if network is None:
            pod = Pod(self._folder, name, self._address(), line, environment)
        else:
            pod = Pod(
                self._folder, name, network.address, [*network.command, *line], network.environment
            )
        self._pods.append(pod)
        return pod

    def engine(
        self,
        name: str,
        checkpoint: Path,
        role: KVRole = KVRole.NONE,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        kv_transfer: KVTransferConfig | None = None,
        kv_mode: str = KVTransferConfig().mode,
        parallel: ParallelConfig | None = None,
        network: Network | None = None,
        service_key_file: str = "",
        max_model_len: int | None = None,
    ) -> Pod:
        """Start an engine.

        Args:
            max_model_len: limit of prompt plus generated tokens; None for the model's limit.
            network: network of the engine; None for a new address in the test's own namespace.
        """
        config = EngineConfig(
            model=ModelConfig(path=str(checkpoint), dtype="float32", max_model_len=max_model_len),
            cache=cache or CacheConfig(memory_bytes=64 * 2**20),
            scheduler=scheduler or SchedulerConfig(),
            kv_transfer=kv_transfer
            or KVTransferConfig(
                role=role,
                transport=KV_TRANSPORT,
                mode=kv_mode,
                lease_s=10.0,
                load_timeout_s=10.0,
            ),
            parallel=parallel or ParallelConfig(),
            num_threads=1,
            drain_timeout_s=20.0,
            service_key_file=service_key_file,
        )
        return self._run(name, "baton-engine", config, network)

    def gateway(
        self,
        name: str,
        checkpoint: Path,
        engines: dict[Pod, str],
        service_key_file: str = "",
        stall_timeout_s: float = 30.0,
        access: AccessConfig | None = None,
        reasoning_parser: str = "auto",
    ) -> Pod:
        """Start a gateway for `engines`, a map from pod to role. `discover()` changes the map."""
        discovery = self.discover(name, engines)
        config = GatewayConfig(
            model=ModelConfig(path=str(checkpoint), served_name="m"),
            discovery=DiscoveryConfig(file=str(discovery)),
            access=access or AccessConfig(),
            drain_timeout_s=20.0,
            service_key_file=service_key_file,
            stall_timeout_s=stall_timeout_s,
            reasoning_parser=reasoning_parser,
        )
        return self._run(name, "baton-gateway", config)

    def discover(self, gateway: str, engines: dict[Pod, str]) -> Path:
        """Write the discovery file `<gateway>-engines.json` of a gateway, and return its path."""
        path = self._folder / f"{gateway}-engines.json"
        endpoints = [
            EngineEndpoint(name=pod.name, role=role, host=pod.address)
            for pod, role in engines.items()
        ]
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(EngineEndpoints(engines=endpoints)))
        temporary.rename(path)
        return path

    def close(self) -> None:
        for pod in self._pods:
            pod.process.kill()
        for pod in self._pods:
            pod.process.wait()


@contextlib.contextmanager
def pods(folder: Path, subnet: int) -> Iterator[Pods]:
    group = Pods(folder, subnet)
    try:
        yield group
    finally:
        group.close()
