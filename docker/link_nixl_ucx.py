"""Link the UCX libraries in NIXL's wheel into a folder, under the names of a system UCX.

Usage: python docker/link_nixl_ucx.py FOLDER

The wheel libucx-cu12, which ucxx loads by default, is built without verbs. NIXL's UCX has verbs and
CUDA. ucxx loads NIXL's libraries if LD_LIBRARY_PATH contains FOLDER and
RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY is 1.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

NAMES = ("ucm", "ucp", "ucs", "uct")


def main(folder: Path) -> None:
    """Create the folder with the links.

    Raises:
        importlib.metadata.PackageNotFoundError: nixl-cu12 is not installed.
        ValueError: the wheel of nixl-cu12 does not have each UCX library exactly once.
    """
    libraries = Path(
        str(importlib.metadata.distribution("nixl-cu12").locate_file("nixl_cu12.libs"))
    )
    (folder / "ucx").mkdir(parents=True)
    # The libraries refer to each other by their names in the wheel.
    for path in libraries.glob("*.so*"):
        (folder / path.name).symlink_to(path)
    for name in NAMES:
        (found,) = libraries.glob(f"lib{name}-*.so.*")
        (folder / f"lib{name}.so").symlink_to(found)
        (folder / f"lib{name}.so.0").symlink_to(found)
    # NIXL's wheel has no libucs_signal. Without this link ucxx would load the one of libucx-cu12,
    # and with it a second libucs.
    (folder / "libucs_signal.so").symlink_to(folder / "libucs.so")
    # UCX loads its modules from the folder of libucs, under names that end in .so as `libucs.so`
    # does. A module of a module (mlx5 of ib) is loaded under its full name.
    for path in (libraries / "ucx").glob("*.so.*"):
        (folder / "ucx" / f"{path.name.partition('.')[0]}.so").symlink_to(path)
        (folder / "ucx" / path.name).symlink_to(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
