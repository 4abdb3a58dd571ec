"""The images run as pods run them: user 65532, a read-only root, the pod's address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from baton_engine.random_checkpoint import create_checkpoint
from baton_operator.builders.pod_template.pod import USER_ID
from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    GATEWAY_PORT,
    CacheConfig,
    DiscoveryConfig,
    EngineConfig,
    EngineEndpoint,
    EngineEndpoints,
    GatewayConfig,
    KVRole,
    KVTransferConfig,
    ModelConfig,
)
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from support.completions import complete
from support.images.container import Image
from support.pods import Pod
from support.waiting import eventually

PREFILL, DECODE, GATEWAY, OPERATOR = (f"127.97.0.{number}" for number in range(1, 5))
MODEL, CONFIG = "/models/demo", "/etc/baton"
OPERATOR_PORT = 8081


def test_the_entry_point_runs_as_the_users_number_with_a_read_only_root(image: Image) -> None:
    assert image.run(*image.config["Entrypoint"], "--help").startswith("usage: baton-")
    assert image.run("id", "-u").strip() == image.run("id", "-g").strip() == str(USER_ID)
    assert "Read-only file system" in image.run("touch", "/opt/baton/file", expect=1)
    image.run("touch", "/tmp/file")


def test_every_command_starts(image: Image) -> None:
    for path in (image.root / "opt/baton/bin").glob("baton-*"):
        assert image.run(path.name, "--help").startswith(f"usage: {path.name}")


@pytest.fixture
def operator(images: dict[str, Image], tmp_path: Path) -> Iterator[Pod]:
    """An operator in its image, with an API server that has no CRD."""
    plane = EmbeddedControlPlane(tmp_path / "plane")
    plane.start(timeout_s=60)
    config = tmp_path / "config"
    config.mkdir()
    (config / "kubeconfig").write_bytes(plane.kubeconfig.read_bytes())  # readable by every user
    command = images["operator"].command(
        *images["operator"].config["Entrypoint"],
        *("--kubeconfig", f"{CONFIG}/kubeconfig"),
        folders={config: CONFIG},
        environment={"POD_IP": OPERATOR},
    )
    pod = Pod(tmp_path, "operator", OPERATOR, command)
    try:
        yield pod
    finally:
        pod.kill()
        plane.stop()


def test_the_operator_waits_for_its_crd(operator: Pod) -> None:
    def healthy() -> bool:
        assert operator.process.poll() is None, operator.tail()
        return operator.get(OPERATOR_PORT, "/health")[0] == 200

    eventually(healthy, timeout_s=60, what="the operator healthy")
    eventually(lambda: "llmservices.yaml" in operator.tail(), timeout_s=60, what="a log line")
    operator.kill()
    eventually(lambda: operator.get(OPERATOR_PORT, "/health")[0] == 0, what="no process left")


@pytest.fixture
def service(images: dict[str, Image], tmp_path: Path) -> Iterator[tuple[Pod, Pod]]:
    """The gateway and the decode engine, beside a prefill engine, each in its image."""
    create_checkpoint(tmp_path / "model", "qwen3", seed=5)
    config = tmp_path / "config"
    config.mkdir()

    def write(name: str, content: msgspec.Struct) -> None:
        (config / f"{name}.json").write_bytes(msgspec.json.encode(content))

    for name, role in (("prefill", KVRole.PRODUCER), ("decode", KVRole.CONSUMER)):
        write(name, EngineConfig(
            model=ModelConfig(path=MODEL, dtype="float32"),
            cache=CacheConfig(memory_bytes=64 * 2**20),
            kv_transfer=KVTransferConfig(role=role),
            num_threads=1,
        ))  # fmt: skip
    write("gateway", GatewayConfig(
        model=ModelConfig(path=MODEL, served_name="m"),
        discovery=DiscoveryConfig(file=f"{CONFIG}/engines.json"),
    ))  # fmt: skip
    endpoints = [
        EngineEndpoint(name=name, role=name, host=address)
        for name, address in (("prefill", PREFILL), ("decode", DECODE))
    ]
    write("engines", EngineEndpoints(engines=endpoints))
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folders = {tmp_path / "model": MODEL, config: CONFIG}

    def start(image: str, name: str, address: str) -> Pod:
        command = images[image].command(
            *images[image].config["Entrypoint"], "--config", f"{CONFIG}/{name}.json",
            folders=folders, environment={"POD_IP": address, "POD_NAME": name},
        )  # fmt: skip
        return Pod(tmp_path, name, address, command)

    prefill = start("engine-cpu", "prefill", PREFILL)
    decode = start("engine-cpu", "decode", DECODE)
    gateway = start("gateway", "gateway", GATEWAY)
    try:
        prefill.wait_ready(ENGINE_HTTP_PORT)
        decode.wait_ready(ENGINE_HTTP_PORT)
        gateway.wait_ready(GATEWAY_PORT)
        yield gateway, decode
    finally:
        for pod in (prefill, decode, gateway):
            pod.kill()


async def test_a_request_is_answered_with_a_hand_off(service: tuple[Pod, Pod]) -> None:
    gateway, decode = service
    url = f"http://{gateway.address}:{GATEWAY_PORT}/v1"
    assert len(await complete(url, list(range(2, 66)), 16)) == 16
    assert decode.metric("baton:kv_transfer_bytes_received_total") > 0


def test_the_engine_has_the_compiled_products(images: dict[str, Image]) -> None:
    program = "from baton_kernels.cpu.instruction_sets import BUILT; print(*BUILT.glob('*.so'))"
    assert ".so" in images["engine-cpu"].run("python", "-c", program)
