"""Controls whether the process keeps freed memory for later tensors.

By default, glibc's malloc may return the memory of a step's tensors to the system. Then the first
writes of the next step cause page faults: about 10,000 for a prompt of 960 tokens.

`keep_freed_memory` makes malloc keep blocks of up to 32 MiB. The C++ operations keep larger results
(kernels/baton_kernels/cpu/source/ops.cpp). With a C library other than glibc, only the results of
the C++ operations are controlled.
"""

from __future__ import annotations

import ctypes

from baton_kernels import cpu

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: In bytes. A larger tensor gets pages of its own, which malloc returns to the system when the
#: tensor is freed. glibc allows no higher threshold.
MMAP_THRESHOLD = 32 << 20
#: Maximum number of freed bytes that malloc keeps.
TRIM_THRESHOLD = 1 << 30


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for later allocations, in the whole process."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)


def return_freed_memory() -> None:
    """Return all freed memory to the system, as far as malloc can."""
    if cpu.OPS is not None:
        cpu.OPS.return_freed_results()
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
