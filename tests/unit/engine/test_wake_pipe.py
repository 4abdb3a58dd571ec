"""The pipe that wakes a polling thread."""

from __future__ import annotations

import contextlib
import select

from baton_engine.wake_pipe import WakePipe


def is_readable(pipe: WakePipe) -> bool:
    return bool(select.select([pipe.reader], [], [], 0)[0])


def test_any_number_of_wakeups_is_one_until_it_is_cleared() -> None:
    with contextlib.closing(WakePipe()) as pipe:
        assert not is_readable(pipe)
        for _ in range(100_000):  # more than the pipe holds
            pipe.wake()
        assert is_readable(pipe)
        pipe.clear()
        assert not is_readable(pipe)
        pipe.wake()
        assert is_readable(pipe)


def test_a_wakeup_after_the_end_is_ignored() -> None:
    pipe = WakePipe()
    pipe.close()
    pipe.wake()
