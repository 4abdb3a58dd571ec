"""The instruction sets for which the operations are compiled, and the one that a processor loads.

There is one compiled file per instruction set, torch version and source hash.
"""

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
    needs: frozenset[str]  #: Required flags of /proc/cpuinfo.


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}


def sets_for_machine(machine: str = platform.machine()) -> tuple[InstructionSet, ...]:
    """Return the instruction sets to compile for a machine type, the best one first.

    The result is empty if there are no C++ operations for the machine type.
    """
    if machine in ("x86_64", "AMD64"):
        v4_bf16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
        return (
            InstructionSet("avx512_bf16", v4_bf16, _V4_BF16),
            InstructionSet("avx512", ("-march=x86-64-v4",), _V4),
            InstructionSet("avx2", ("-march=x86-64-v3",), _V3),
        )
    return ()


def library_file(instruction_set: InstructionSet) -> Path:
    """Return the path of the library for the installed torch and the current sources.

    The file may not exist.
    """
    key = hashlib.sha256(repr((FLAGS, instruction_set.flags)).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    return BUILT / f"{instruction_set.name}-torch{torch.__version__}-{key.hexdigest()[:12]}.so"


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's flags, by their Linux names; an empty set if the flags are unknown."""
    try:
        with cpuinfo.open() as lines:
            for line in lines:
                name, _, flags = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(flags.split())
    except OSError:
        pass
    return frozenset()


def choose(flags: frozenset[str], wanted: str) -> tuple[InstructionSet | None, str]:
    """Choose the best compiled instruction set that this processor supports.

    Args:
        flags: result of `processor_flags`.
        wanted: value of BATON_CPU_KERNELS: "torch", an instruction set's name, or "" for the best.

    Returns:
        (instruction set, its name), or (None, reason) if the torch versions must run.
    """
    if wanted == "torch":
        return None, "BATON_CPU_KERNELS=torch"
    able = [one for one in sets_for_machine() if one.needs <= flags and wanted in ("", one.name)]
    if not able:
        setting = f" and BATON_CPU_KERNELS={wanted}" if wanted else ""
        return None, f"no C++ kernels for this processor{setting}"
    compiled = next((one for one in able if library_file(one).exists()), None)
    if compiled is None:
        return None, "not compiled for this version; run python -m baton_kernels.cpu.build"
    return compiled, compiled.name
