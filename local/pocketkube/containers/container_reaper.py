"""The reaper process, which kills all containers when the kubelet ends, even after SIGKILL.

The kubelet starts the reaper as `python -I -S container_reaper.py MARKER`, and writes to its
standard input. The line `+123` adds session 123, and the line `-123` removes the session. When
standard input closes, the reaper kills all processes of the added sessions. It also kills all
processes with MARKER, a text of the form NAME=value, in their environment.

This module imports only the standard library, so that the reaper starts fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection


def find_processes(sessions: Collection[int], marker: str) -> list[int]:
    """Return the pids of all processes in `sessions` or with `marker` in their environment.

    A daemon that left its session is found by the marker. A process that overwrote its environment
    is found by its session.

    Args:
        sessions: session ids. Processes whose process group has one of these ids also match.
        marker: an environment variable, as "NAME=value".
    """
    needle = b"\0" + marker.encode() + b"\0"
    own = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == own:
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The command name can contain any byte. The fields begin after the last
                # parenthesis.
                state, _, group, session = file.read().rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(session) in sessions or int(group) in sessions:
                found.append(int(entry))
                continue
            with open(f"/proc/{entry}/environ", "rb") as file:
                if needle in b"\0" + file.read():
                    found.append(int(entry))
    return found


def kill_all(sessions: Collection[int], marker: str, timeout_s: float) -> bool:
    """Kill all processes in `sessions` or with `marker` in their environment.

    Returns:
        True once two consecutive searches find no process, False after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    empty = 0
    while empty < 2:
        processes = find_processes(sessions, marker)
        empty = 0 if processes else empty + 1
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def main(marker: str) -> int:
    """Read session ids from standard input until its end. Then kill the sessions' processes.

    Also kill all other processes with `marker` in their environment. A line `+ID` adds a session,
    and `-ID` removes the session.

    Returns:
        The exit code: 0 if no process is left, else 1.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        change = sessions.add if line[0] == "+" else sessions.discard
        change(int(line[1:]))
    return 0 if kill_all(sessions, marker, timeout_s=30.0) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
