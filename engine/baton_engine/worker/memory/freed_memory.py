"""Controls how much freed memory the process keeps for later tensors.

By default, glibc's malloc may return the memory of a step's tensors to the system. Then the first
writes of the next step cause page faults: about 10,000 for a prompt of 960 tokens.

`keep_freed_memory` makes malloc keep blocks of up to 32 MiB. The C++ operations keep larger results
(kernels/baton_kernels/cpu/source/tensor_memory.h). The available memory limits how much each of
them keeps. Without glibc, only the results of the C++ operations are controlled.
"""

from __future__ import annotations

import ctypes

from baton_kernels import cpu

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: In bytes. A larger tensor gets pages of its own, which malloc returns to the system when the
#: tensor is freed. glibc allows no higher threshold.
MMAP_THRESHOLD = 32 << 20
#: Maximum number of freed bytes that malloc keeps. The C++ operations have the same maximum.
MAX_KEPT_BYTES = 1 << 30
#: malloc and the C++ operations each keep at most the available memory divided by this number.
#: Linux cannot reclaim kept memory, so more of it could exceed the limit of the pod.
MAX_KEPT_DIVISOR = 16


def keep_freed_memory(available: int) -> None:
    """Make malloc and the C++ operations keep freed memory for later allocations.

    Args:
        available: bytes that this process can still allocate for the tensors of steps.
    """
    max_kept = min(MAX_KEPT_BYTES, max(0, available) // MAX_KEPT_DIVISOR)
    if cpu.OPS is not None:
        cpu.OPS.keep_freed_results(max_kept)
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, max_kept)


def return_freed_memory() -> None:
    """Return all freed memory to the system, as far as malloc can."""
    if cpu.OPS is not None:
        cpu.OPS.return_freed_results()
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
