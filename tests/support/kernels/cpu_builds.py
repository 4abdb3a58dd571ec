"""Builds of the CPU kernels, and processes that load them.

For the tests of the build and of the instruction sets.
"""

from __future__ import annotations

import os
import subprocess
import sys

from baton_kernels.cpu import instruction_sets

AVX2, AVX512, AVX512_BF16 = (one.needs for one in instruction_sets.sets_for_machine("x86_64")[::-1])


def pretend_to_compile(*names: str) -> None:
    for one in instruction_sets.sets_for_machine("x86_64"):
        if one.name in names:
            instruction_sets.library_file(one).touch()


def chosen(flags: frozenset[str], wanted: str = "") -> str | None:
    instruction_set, _ = instruction_sets.choose(flags, wanted)
    return None if instruction_set is None else instruction_set.name


def in_new_process(program: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
