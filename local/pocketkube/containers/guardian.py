"""The guardian: a process that kills every container when its kubelet ends, also by SIGKILL.

It runs as a script, `python -I -S guardian.py MARKER`, in a session of its own. Its standard input
is a pipe from the kubelet, which writes one line for each session to watch (`+123`) or to forget
(`-123`). When the pipe closes, the guardian kills all processes of these sessions, and all with
MARKER in their environment. It imports only the standard library, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection


def find_processes(sessions: Collection[int], marker: str) -> list[int]:
    """Find the live processes of `sessions`, and those with `marker` in their environment.

    A session here is a session id or a process group. The marker ("NAME=value") finds daemons that
    left the session. The session finds processes that overwrote their environment.
    """
    needle = b"\0" + marker.encode() + b"\0"
    own = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == own:
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The command name can contain any byte, so the fields are read from behind its
                # last parenthesis.
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
    """Send SIGKILL until two searches find nothing; False if `timeout_s` passed first."""
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
    """Watch standard input until it closes, then kill."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        change = sessions.add if line[0] == "+" else sessions.discard
        change(int(line[1:]))
    return 0 if kill_all(sessions, marker, timeout_s=30.0) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
