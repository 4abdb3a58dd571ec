"""Freed tensors stay with the process while it runs steps, and return when it sleeps."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from baton_engine.worker.memory import freed_memory
from baton_engine.worker.memory.freed_memory import keep_freed_memory

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

if sys.argv[1:]:
    keep_freed_memory(int(sys.argv[1]))
before = libc.mallinfo2().hblks
address = libc.malloc(24 << 20)
has_own_pages = libc.mallinfo2().hblks > before
libc.free(address)
kept = libc.mallinfo2().keepcost
return_freed_memory()
print(json.dumps([has_own_pages, kept, libc.mallinfo2().keepcost]))
"""


def run(*available: int) -> tuple[bool, int, int]:
    command = [sys.executable, "-c", SCRIPT, *map(str, available)]
    done = subprocess.run(command, capture_output=True, check=True)
    has_own_pages, kept, kept_asleep = json.loads(done.stdout)
    return has_own_pages, kept, kept_asleep


def test_malloc_keeps_freed_memory_until_a_sleep() -> None:
    has_own_pages, kept, kept_asleep = run(64 << 30)
    assert not has_own_pages
    assert kept >= 24 << 20
    assert kept_asleep < 1 << 20


def test_malloc_keeps_less_where_less_memory_is_available() -> None:
    has_own_pages, kept, _ = run(16 * (8 << 20))
    assert not has_own_pages
    assert kept <= 8 << 20


@pytest.mark.parametrize(
    ("available", "max_kept"), [(64 << 30, 1 << 30), (2 << 30, 128 << 20), (15, 0), (-1 << 30, 0)]
)
def test_malloc_and_the_operations_keep_at_most_a_sixteenth_of_the_available_memory(
    monkeypatch: pytest.MonkeyPatch, available: int, max_kept: int
) -> None:
    by_malloc: dict[int, int] = {}
    by_operations: list[int] = []
    libc = SimpleNamespace(mallopt=by_malloc.__setitem__)
    monkeypatch.setattr(freed_memory, "ctypes", SimpleNamespace(CDLL=lambda _: libc))
    operations = SimpleNamespace(keep_freed_results=by_operations.append)
    monkeypatch.setattr(freed_memory, "cpu", SimpleNamespace(OPS=operations))
    keep_freed_memory(available)
    assert by_malloc[freed_memory.M_TRIM_THRESHOLD] == max_kept
    assert by_operations == [max_kept]


def test_by_default_a_large_tensor_has_pages_of_its_own() -> None:
    """If malloc changes this, the module may become unnecessary."""
    has_own_pages, kept, _ = run()
    assert has_own_pages
    assert kept < 24 << 20
