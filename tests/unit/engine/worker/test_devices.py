"""The dtype of a worker, from the configuration, the checkpoint and the CPU's instructions."""

from __future__ import annotations

import pytest
import torch

from baton_engine.worker.devices import resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("checkpoint", "instructions", "expected"),
    [
        ("bfloat16", "avx512_bf16", torch.bfloat16),
        ("bfloat16", "amx_bf16", torch.bfloat16),
        ("bfloat16", "avx512_fp16", torch.float32),
        ("float16", "avx512_fp16", torch.float16),
        ("float16", "avx512_bf16", torch.float32),
        ("bfloat16", "", torch.float32),
        ("float32", "avx512_bf16", torch.float32),
        ("float64", "avx512_bf16", torch.float32),
    ],
)
def test_auto_on_a_cpu_keeps_the_checkpoints_dtype_if_it_has_instructions_for_it(
    checkpoint: str, instructions: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx512_f": True, instructions: True}
    )
    assert resolve_dtype("auto", checkpoint, CPU) is expected


def test_auto_on_a_gpu_keeps_the_checkpoints_dtype() -> None:
    assert resolve_dtype("auto", "bfloat16", CUDA) is torch.bfloat16
    assert resolve_dtype("auto", "float16", CUDA) is torch.float16


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_configured_dtype_overrides_the_checkpoints(
    device: torch.device,
) -> None:
    assert resolve_dtype("float16", "bfloat16", device) is torch.float16
