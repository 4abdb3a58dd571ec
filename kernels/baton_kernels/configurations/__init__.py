"""How to launch each Triton kernel on each kind of GPU, measured ahead of serving; nothing is tuned while serving.

`<device>.json` beside this file, written by `benchmarks/kernels/tune.py`: {operation: {shape class: {name: integer}}}. The device
is the GPU's name as `device_key` makes it. An operation names its shape classes itself (its Triton file says how) and brings the
configuration that serves where nothing was measured.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import resources
from pathlib import Path

import torch

Configuration = Mapping[str, int]
"""Constants of a launch by name: tile sizes, num_warps, num_stages."""
Table = dict[str, dict[str, dict[str, int]]]
"""{operation: {shape class: configuration}}."""
Answer = Callable[[str, str, Configuration], Configuration]
"""(operation, shape class, default) -> what to launch with."""

_answer: ContextVar[Answer | None] = ContextVar("answer", default=None)


def configuration(
    operation: str, shape_class: str, device: torch.device, default: Configuration
) -> Configuration:
    """What was measured best for the operation on this device and shape class, or `default`.

    Args:
        operation: the kernel folder's name, "attention" for example.
        shape_class: what the launch is tuned for, "few/dim=4096" for example.
        default: names every constant; a measured one replaces those it names.
    """
    answer = _answer.get()
    if answer is not None:
        return answer(operation, shape_class, default)
    measured = _table(device_key(device)).get(operation, {}).get(shape_class)
    return default if measured is None else {**default, **measured}


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Within it, this thread's launches get what `answer` says instead of what the table says: for measuring, not for serving."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


@functools.cache
def device_key(device: torch.device) -> str:
    """Names the table: "nvidia-h200"; "cpu" where kernels are interpreted."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


def read_table(file: Path) -> Table:
    """What the file holds; empty if there is none."""
    return json.loads(file.read_text()) if file.is_file() else {}


def write_table(file: Path, measured: Mapping[str, Mapping[str, Configuration | None]]) -> None:
    """Puts what was measured in the place of what the file says of the same shape classes, and leaves all else.

    Args:
        measured: None: the kernel's default is the best. The file says nothing of that shape class then.
    """
    table = read_table(file)
    for operation, classes in measured.items():
        merged = {**table.get(operation, {}), **classes}
        table[operation] = {
            shape_class: dict(config)
            for shape_class, config in merged.items()
            if config is not None
        }
    file.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


def table_file(key: str) -> Path:
    """Of the device called so, as `device_key` says; it need not exist."""
    return Path(str(resources.files(__name__))) / f"{key}.json"


@functools.cache
def _table(key: str) -> Table:
    return read_table(table_file(key))
