"""Selects the device and the dtype of a worker, and copies arrays to the device."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.models.errors import ConfigurationError
from baton_kernels.linear import native_instructions
from baton_protocol.options.config import QUANTIZATIONS

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the device for a configured name: auto, cpu or cuda. auto prefers a GPU.

    Raises:
        ConfigurationError: the name is cuda, but torch finds no GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "InvalidConfig",
            "device is cuda, but torch sees no CUDA device; set device to cpu or auto",
        )
    return torch.device(name)


def resolve_dtype(configured: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV cache. Log the reason for the choice.

    auto means the dtype of the checkpoint. A CPU without native matrix products in that dtype uses
    float32 instead.

    Args:
        configured: auto or one of the keys of DTYPES.
        checkpoint: torch's name of the dtype in which the checkpoint stores weights.
    """
    if configured != "auto":
        logger.info("the model runs in dtype %s, as configured", configured)
        return DTYPES[configured]
    stored = DTYPES.get(checkpoint, torch.float32)
    if device.type != "cpu" or stored is torch.float32:
        logger.info("the model runs in dtype %s, as in the checkpoint", dtype_name(stored))
        return stored
    if instructions := native_instructions(stored):
        logger.info(
            "the model runs in dtype %s, as in the checkpoint; this CPU has native matrix "
            "products in it (%s)",
            checkpoint,
            instructions,
        )
        return stored
    logger.info(
        "the model runs in dtype float32, because this CPU has no native matrix products in the "
        "checkpoint's %s",
        checkpoint,
    )
    return torch.float32


def check_quantization(quantization: str | None, device: torch.device) -> None:
    """Check that the device supports the quantization.

    Raises:
        ConfigurationError: the quantization is unknown, or the device does not support it.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ConfigurationError(
            "InvalidConfig",
            f"quantization must be {' or '.join(QUANTIZATIONS)}, or not given, "
            f"got {quantization!r}",
        )
    if device.type != "cpu":
        raise ConfigurationError(
            "InvalidConfig",
            f"quantization {quantization} is for CPUs, but the model runs on {device.type}; leave "
            "quantization out, or set device to cpu",
        )


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return a tensor with the values of `array` on `device`.

    On a CPU, the tensor shares memory with `array`. The copy to a GPU is asynchronous.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")
