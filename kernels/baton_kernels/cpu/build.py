"""The compilation of the C++ operations: `python -m baton_kernels.cpu.build`.

Run it in the environment that will use them. It needs GCC with C++20 (`$CXX`, else `c++` or `g++`)
and torch's headers. It writes a file per instruction set to `built/`, for any processor; the right
one is chosen at load time. File names contain the torch version and a hash of the sources. Run it
again after a change of either.
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

from baton_kernels.cpu.libraries import (
    BUILT,
    FLAGS,
    SOURCES,
    InstructionSet,
    instruction_sets,
    library_file,
)

#: Compiles with OpenMP but does not link it: torch has loaded its copy, and a second one would have
#: threads of its own. torch's copy is GCC's, which Clang's code does not call.
OPENMP = "-fopenmp"


def compiler() -> str | None:
    """Return the command of the C++ compiler, or None."""
    candidates = (os.environ.get("CXX"), "c++", "g++")
    return next((command for command in candidates if command and shutil.which(command)), None)


def build(instruction_set: InstructionSet, command: str) -> Path:
    """Compile if necessary, and remove older files for the same torch version.

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
    """Compile for all instruction sets. Exits with 0 on failure: torch versions replace them."""
    wanted = instruction_sets()
    command = compiler()
    if not wanted or command is None:
        missing = "C++ compiler" if command is None else f"C++ kernels for {platform.machine()}"
        print(f"no {missing}: Baton uses slower torch operations on this CPU")
        return 0
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        futures = {one.name: pool.submit(build, one, command) for one in wanted}
    failed = {
        name: error for name, future in futures.items() if (error := future.exception()) is not None
    }
    for name, error in failed.items():
        print(
            f"compiling the CPU kernels for {name} failed; Baton uses slower torch operations "
            f"there:\n{error}",
            file=sys.stderr,
        )
    built = ", ".join(name for name in futures if name not in failed)
    if built:
        print(f"CPU kernels compiled for {built} in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
