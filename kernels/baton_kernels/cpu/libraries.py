"""The files that hold the compiled operations: one for each instruction set, torch version and state of the sources."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "source"
BUILT = FOLDER / "built"

FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")


@dataclass(frozen=True)
class InstructionSet:
    name: str
    flags: tuple[str, ...]
    #: Flags of /proc/cpuinfo without which its instructions end the process.
    needs: frozenset[str]


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def instruction_sets(machine: str = platform.machine()) -> tuple[InstructionSet, ...]:
    """The best first. Empty for machines that the operations were never compiled for."""
    if machine in ("x86_64", "AMD64"):
        return (
            InstructionSet("avx512", ("-march=x86-64-v4",), _V4),
            InstructionSet("avx2", ("-march=x86-64-v3",), _V3),
        )
    return ()


def library_file(instruction_set: InstructionSet) -> Path:
    """Where its compiled operations lie, for the torch and the sources of this process. It need not exist."""
    key = hashlib.sha256(repr((FLAGS, instruction_set.flags)).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    return BUILT / f"{instruction_set.name}-torch{torch.__version__}-{key.hexdigest()[:12]}.so"
