"""Compiles the C++ operations: `python -m baton_kernels.cpu.build`.

Run this command in the Python environment that will use the operations. The command needs GCC with
C++20 (`$CXX`, else `c++` or `g++`) and torch's headers. It writes one file per instruction set to
`built/`. Each process loads the file for its processor. File names contain the torch version and a
hash of the sources. Run the command again after a change of torch or the sources.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from baton_kernels.cpu.instruction_sets import (
    BUILT,
    FLAGS,
    SOURCES,
    InstructionSet,
    library_file,
    sets_for_machine,
)

#: Compiles with OpenMP, but links no OpenMP library. torch has already loaded one, and a second
#: library would have its own threads. torch's library is GCC's, so Clang's code cannot call it.
OPENMP = "-fopenmp"


def compiler() -> str | None:
    """Return the command of GCC's C++ compiler, or None if it is not found."""
    candidates = (os.environ.get("CXX"), "c++", "g++")
    return next((command for command in candidates if command and _is_gcc(command)), None)


def _is_gcc(command: str) -> bool:
    if shutil.which(command) is None:
        return False
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return "Free Software Foundation" in version.stdout  # in the version text of GCC only


def build(instruction_set: InstructionSet, command: str) -> Path:
    """Return the path of the library for an instruction set. Compile it if necessary.

    A compilation removes older files for the same instruction set and torch version.

    Raises:
        RuntimeError: the compiler failed. The message contains its output.
    """
    target = library_file(instruction_set)
    if target.exists():
        return target
    BUILT.mkdir(exist_ok=True)
    include, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        compiled, linked = Path(folder, "ops.o"), Path(folder, "ops.so")
        flags = [*FLAGS, *instruction_set.flags, OPENMP, abi, "-isystem", str(include)]
        _run([command, *flags, "-c", str(SOURCES / "ops.cpp"), "-o", str(compiled)])
        _run(
            [
                command,
                "-shared",
                str(compiled),
                "-o",
                str(linked),
                f"-L{libraries}",
                "-ltorch_cpu",
                "-lc10",
            ]
        )
        linked.replace(target)  # atomic: another process may be loading
    for old in BUILT.glob(f"{instruction_set.name}-torch{torch.__version__}-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-4000:]}")


def main() -> int:
    """Compile the operations for all instruction sets. Return the exit code, which is always 0.

    A failed compilation is not an error, because torch operations replace the compiled ones.
    """
    wanted = sets_for_machine()
    command = compiler()
    if not wanted or command is None:
        missing = "C++ compiler" if command is None else f"C++ kernels for {platform.machine()}"
        print(f"no {missing}: Baton uses slower torch operations on this CPU")
        return 0
    started = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each compilation takes 1 GB of memory
        futures = {one.name: pool.submit(build, one, command) for one in wanted}
    failed = {
        name: error for name, future in futures.items() if (error := future.exception()) is not None
    }
    for name, error in failed.items():
        print(
            f"compiling the CPU kernels for {name} failed; Baton uses slower torch operations "
            f"on such CPUs:\n{error}",
            file=sys.stderr,
        )
    built = ", ".join(name for name in futures if name not in failed)
    if built:
        print(f"CPU kernels compiled for {built} in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
