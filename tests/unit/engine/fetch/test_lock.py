"""The lock between fetchers: one holder, and locks of dead and frozen processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton_engine.fetch.lock import FetchLock, boot_id
from support.waiting import eventually


def test_a_lock_has_one_holder_until_it_is_released(
    tmp_path: Path,
) -> None:
    first, second = FetchLock(tmp_path / "lock"), FetchLock(tmp_path / "lock")
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


def write_beat(path: Path, machine: str, count: int = 7) -> None:
    path.write_bytes(msgspec.json.encode({"holder": "x", "machine": machine, "count": count}))


def test_the_lock_of_a_dead_process_on_this_machine_is_taken_at_once(tmp_path: Path) -> None:
    write_beat(tmp_path / "lock", boot_id())
    lock = FetchLock(tmp_path / "lock", dead_after_s=3600)
    assert lock.try_acquire()
    lock.release()


def test_the_lock_of_another_machine_is_held_while_its_heartbeat_changes(tmp_path: Path) -> None:
    """Some shared file systems do not share flock between machines."""
    path = tmp_path / "lock"
    write_beat(path, "another machine")
    patient, quick = FetchLock(path, dead_after_s=3600), FetchLock(path, dead_after_s=0.2)
    assert not patient.try_acquire()
    for count in range(3):
        write_beat(path, "another machine", count)
        assert not quick.try_acquire(), "the heartbeat has just changed"
    eventually(quick.try_acquire, timeout_s=30, what="the lock of a holder without heartbeats")
    quick.release()


def test_the_lock_of_a_frozen_holder_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    frozen = FetchLock(path, beat_s=3600)
    assert frozen.try_acquire()
    other = FetchLock(path, dead_after_s=0.2)
    eventually(other.try_acquire, timeout_s=30, what="the lock of a frozen holder")
    frozen.release()
    third = FetchLock(path, dead_after_s=3600)
    assert not third.try_acquire(), "the frozen holder released the lock of another process"
    other.release()
