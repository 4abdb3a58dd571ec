"""Launch configurations of the Triton kernels, measured per GPU. Nothing is measured while serving.

`benchmarks/kernels/tune.py` writes one table per GPU, `<device_key>.json`, into this folder:
{operation: {shape class: {name: integer}}}. A shape class is a set of launches that share one
configuration. The Triton file of an operation defines the shape classes, and a default
configuration for devices without measurements.
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

Configuration = Mapping[str, int]  #: Constants of a launch: tile sizes, num_warps, num_stages.
Table = dict[str, dict[str, dict[str, int]]]  #: {operation: {shape class: configuration}}.
#: A function (operation, shape class, default configuration) -> configuration.
Lookup = Callable[[str, str, Configuration], Configuration]

_lookup: ContextVar[Lookup | None] = ContextVar("lookup", default=None)


def configuration(
    operation: str, shape_class: str, device: torch.device, default: Configuration
) -> Configuration:
    """Return the measured configuration for a device and shape class; `default` if not measured.

    Args:
        operation: name of the kernel's folder, for example "attention".
        shape_class: shape class of the launch, for example "few/dim=4096".
        device: device of the launch.
        default: values of all constants of the launch. Constants that were not measured keep these
            values.
    """
    lookup = _lookup.get()
    if lookup is not None:
        return lookup(operation, shape_class, default)
    measured = _table(device_key(device)).get(operation, {}).get(shape_class)
    return default if measured is None else {**default, **measured}


@contextmanager
def overriding(lookup: Lookup) -> Iterator[None]:
    """Make `configuration` return the result of `lookup` within a `with` block.

    The tuner and tests use this to choose configurations.
    """
    token = _lookup.set(lookup)
    try:
        yield
    finally:
        _lookup.reset(token)


@functools.cache
def device_key(device: torch.device) -> str:
    """Return the name of a device's configuration table, such as "nvidia-h200".

    The result is "cpu" if Triton's interpreter runs the kernels.
    """
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


def read_table(file: Path) -> Table:
    """Return the configuration table in a file; an empty table if the file does not exist."""
    return json.loads(file.read_text()) if file.is_file() else {}


def write_table(file: Path, measured: Mapping[str, Mapping[str, Configuration | None]]) -> None:
    """Write measured configurations into a table file, and keep the file's other entries.

    Args:
        file: the table file, which may not exist.
        measured: {operation: {shape class: configuration}}. The value None removes an
            entry. The launch then uses the kernel's default configuration.
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
    """Return the path of the table file for a `device_key`. The file may not exist."""
    return Path(str(resources.files(__name__))) / f"{key}.json"


@functools.cache
def _table(key: str) -> Table:
    return read_table(table_file(key))
