"""Which device and dtype a worker computes with, from what is configured and what the machine has."""

from __future__ import annotations

import torch

from baton_engine.models.errors import ConfigurationError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device called `name`, of auto, cpu and cuda. Raises ConfigurationError if it is none of them, or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigurationError("InvalidConfig", f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "InvalidConfig", "device is cuda, but torch sees no CUDA device; set device to cpu or auto"
        )
    return torch.device(name)


def resolve_dtype(configured: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Of weights and KV cache.

    Args:
        configured: auto or one of DTYPES.
        checkpoint: torch's name of what the weights are stored in.

    Raises:
        ConfigurationError: if `configured` is something else.
    """
    if configured != "auto":
        if configured not in DTYPES:
            raise ConfigurationError(
                "InvalidConfig", f"dtype must be auto or one of {', '.join(DTYPES)}, got {configured!r}"
            )
        return DTYPES[configured]
    wanted = DTYPES.get(checkpoint, torch.float32)
    if device.type == "cpu" and not (wanted is torch.bfloat16 and _cpu_has_native_bf16()):
        return torch.float32  # emulated half precision is slower than float32
    return wanted


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without prefix."""
    return str(dtype).removeprefix("torch.")


def _cpu_has_native_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
