"""What glibc's malloc does with freed memory. Other C libraries have no such settings.

By default malloc may return the tensors of a step to the system. The first writes of the next step
then fault their pages in again: about 10,000 pages for a prompt of 960 tokens.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
#: Larger tensors get pages of their own and return them. glibc allows no higher limit.
MMAP_THRESHOLD = 32 << 20
#: Freed bytes that malloc keeps.
TRIM_THRESHOLD = 1 << 30


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for the next step, in the whole process."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)


def return_freed_memory() -> None:
    """Return the memory that malloc keeps to the system, once."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
