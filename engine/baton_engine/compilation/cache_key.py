"""Keys of the disk cache of compiled pieces (see `piecewise`).

`environment_key` covers source code, configuration, versions and machine. `piece_key` covers the
graph of one piece.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext


def environment_key(
    source_files: Iterable[str], config: Sequence[object], device: torch.device
) -> str:
    """Return a hash of everything, except the graph, that compiled code depends on.

    The hash covers source files, versions, the settings of Inductor, `config` and the device.
    Compiled code can be reused if both this hash and the graph's `piece_key` are unchanged.

    Args:
        source_files: files whose code was traced.
        config: other values that affect the compiled code. Their `repr` is hashed.
        device: device of the model.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"baton-compile")
    for path in sorted({*source_files, *map(str, Path(__file__).parent.glob("*.py"))}):
        digest.update(path.encode() + b"\0" + _content(path))
    versions = {name: _version(name) for name in ("torch", "triton", "baton")}
    for part in (
        versions,
        torch.version.cuda,
        platform.python_version(),
        _describe(device),
        _settings(),
        *config,
    ):
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()


def traced_source_files(graph: fx.GraphModule) -> set[str]:
    """Return the paths of the source files whose code was traced into the graph.

    Call this function only inside a torch.compile backend.
    """
    files: set[str] = set()
    codes = getattr(TracingContext, "get_traced_code", lambda: None)()
    files.update(code.co_filename for code in codes or ())
    # Not all versions of torch have get_traced_code; stack traces cover the files with operators.
    for node in graph.graph.nodes:
        for line in (node.stack_trace or "").splitlines():
            if line.lstrip().startswith('File "'):
                files.add(line.split('"')[1])
    return {path for path in files if Path(path).is_file()}


def piece_key(graph: fx.GraphModule) -> str | None:
    """Return a hash of the computation in `graph`, which is one piece of the model.

    The names of the nodes do not affect the hash.

    Returns:
        The hash. None if the graph owns tensors or submodules, because their names do not identify
        their content.
    """
    numbers: dict[fx.Node, int] = {}
    digest = hashlib.blake2b(digest_size=16)
    for number, node in enumerate(graph.graph.nodes):
        if node.op in ("get_attr", "call_module"):
            return None
        target = "" if node.op in ("placeholder", "output") else _name(node.target)
        arguments: object = ()
        if node.op != "placeholder":  # a placeholder's only argument is its default
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda arg: f"%{numbers[arg]}")
        digest.update(
            f"{node.op} {target} {arguments!r} {_meta(node.meta.get('example_value'))}\n".encode()
        )
        numbers[node] = number
    return digest.hexdigest()


def _name(target: Any) -> str:
    return (
        target
        if isinstance(target, str)
        else f"{getattr(target, '__module__', '')}.{target!s}".split(" at 0x")[0]
    )


def _meta(value: Any) -> str:
    if isinstance(value, Tensor):
        layout = f"{tuple(value.shape)} {value.stride()}"
        return f"{value.dtype} {value.device} {layout} {value.requires_grad}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_meta, value))
    return str(value)


def _content(path: str) -> bytes:
    try:
        return hashlib.blake2b(Path(path).read_bytes()).digest()
    except OSError:
        return b"gone"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe(device: torch.device) -> object:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    # Inductor generates CPU code for an instruction set and a number of threads.
    instructions = sorted(
        name for name, present in torch.cpu.get_capabilities().items() if present is True
    )
    return (
        device.type,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        instructions,
        torch.get_num_threads(),
    )


def _settings() -> list[tuple[str, str]]:
    """Return the TORCHINDUCTOR_* variables except TORCHINDUCTOR_CACHE_DIR, sorted by name."""
    names = (
        name
        for name in os.environ
        if name.startswith("TORCHINDUCTOR_") and name != "TORCHINDUCTOR_CACHE_DIR"
    )
    return sorted((name, os.environ[name]) for name in names)
