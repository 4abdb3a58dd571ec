"""Fixtures: checkpoints, and per architecture a prefill engine, a decode engine and a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    GATEWAY_PORT,
    KVRole,
    SchedulerConfig,
)
from support.parity import reference_model
from support.pods import Pod, Pods, pods

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe")
#: How the decode engine gets its blocks. Both modes are tested through the gateway.
KV_MODES = {"llama": "push", "qwen3": "pull", "qwen3_moe": "push"}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Create one small checkpoint per architecture."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {arch: create_checkpoint(root / arch, arch, seed=5) for arch in ARCHITECTURES}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, for tests of engines in this process."""
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    return create_checkpoint(folder, "llama", num_layers=2, hidden_size=64, seed=3)


@dataclass
class Stack:
    arch: str
    checkpoint: Path
    group: Pods
    prefill: Pod
    decode: Pod
    gateway: Pod
    reference: PreTrainedModel

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}:{GATEWAY_PORT}/v1"


def start_stack(arch: str, checkpoint: Path, group: Pods) -> Stack:
    chunked = SchedulerConfig(max_num_batched_tokens=48)  # prompts of several chunks
    prefill = group.engine("prefill", checkpoint, KVRole.PRODUCER, scheduler=chunked)
    decode = group.engine("decode", checkpoint, KVRole.CONSUMER, kv_mode=KV_MODES[arch])
    gateway = group.gateway("gateway", checkpoint, {prefill: "prefill", decode: "decode"})
    for pod in (prefill, decode):
        pod.wait_ready(ENGINE_HTTP_PORT)
    gateway.wait_ready(GATEWAY_PORT)
    return Stack(arch, checkpoint, group, prefill, decode, gateway, reference_model(checkpoint))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def stack(request, checkpoints, tmp_path_factory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp(f"stack-{request.param}")
    with pods(folder, ARCHITECTURES.index(request.param)) as group:
        yield start_stack(request.param, checkpoints[request.param], group)


@pytest.fixture
def own_stack(checkpoints, tmp_path) -> Iterator[Stack]:
    """Start a stack for a test that kills processes."""
    with pods(tmp_path, 9) as group:
        yield start_stack("qwen3", checkpoints["qwen3"], group)
