"""Freed tensors stay with the process while it runs steps, and return when it sleeps."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33"
)
#: Allocates and frees 24 MiB. Prints whether they had pages of their own, which a free returns, and
#: the bytes that malloc keeps after the free and after a sleep.
SCRIPT = """
import ctypes, json, sys
from baton_engine.worker.memory.freed_memory import keep_freed_memory, return_freed_memory

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Mallinfo2, ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

if sys.argv[1] == "keep":
    keep_freed_memory()
before = libc.mallinfo2().hblks
address = libc.malloc(24 << 20)
has_own_pages = libc.mallinfo2().hblks > before
libc.free(address)
kept = libc.mallinfo2().keepcost
return_freed_memory()
print(json.dumps([has_own_pages, kept, libc.mallinfo2().keepcost]))
"""


def run(mode: str) -> tuple[bool, int, int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, check=True)
    has_own_pages, kept, kept_asleep = json.loads(done.stdout)
    return has_own_pages, kept, kept_asleep


def test_malloc_keeps_freed_memory_until_a_sleep() -> None:
    has_own_pages, kept, kept_asleep = run("keep")
    assert not has_own_pages
    assert kept >= 24 << 20
    assert kept_asleep < 1 << 20


def test_by_default_a_large_tensor_has_pages_of_its_own() -> None:
    """If malloc changes this, the module may be needless."""
    has_own_pages, kept, _ = run("default")
    assert has_own_pages
    assert kept < 24 << 20
