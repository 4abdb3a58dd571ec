"""How to launch each Triton kernel on each kind of GPU, measured ahead of serving; nothing is tuned while serving.

`<device>.json` beside this file, written by `benchmarks/kernels/tune.py`: {operation: {shape class: {name: integer}}}. The device
is the GPU's name as `device_key` makes it. An operation names its shape classes itself (its Triton file says how) and brings the
configuration that serves where nothing was measured.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources

import torch

Configuration = Mapping[str, int]
"""Constants of a launch by name: tile sizes, num_warps, num_stages."""


def configuration(operation: str, shape_class: str, device: torch.device, default: Configuration) -> Configuration:
    """What was measured best for the operation on this device and shape class, or `default`.

    Args:
        operation: the kernel folder's name, "attention" for example.
        shape_class: what the launch is tuned for, "decode/head_dim=128" for example.
        default: names every constant; a measured one replaces those it names.
    """
    measured = _table(device_key(device)).get(operation, {}).get(shape_class)
    return default if measured is None else {**default, **measured}


@functools.cache
def device_key(device: torch.device) -> str:
    """Names the table: "nvidia-h200"; "cpu" where kernels are interpreted."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


@functools.cache
def _table(key: str) -> dict[str, dict[str, dict[str, int]]]:
    file = resources.files(__name__) / f"{key}.json"
    return json.loads(file.read_text()) if file.is_file() else {}
