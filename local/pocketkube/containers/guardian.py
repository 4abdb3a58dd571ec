"""The guardian: a process that ends every container when its kubelet dies, kill -9 included.

It runs as a script of its own (`python -I -S guardian.py MARKER`) in its own session with the read end of a pipe as standard
input; the kubelet holds the write end and names sessions to watch (`+123`) or forget (`-123`), a line each. When the
pipe closes, every process of these sessions, and every process whose environment carries MARKER, is killed. It imports
nothing but the standard library, so it starts fast and cannot break with the rest.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection


def find_processes(sessions: Collection[int], marker: str) -> list[int]:
    """Living processes that belong to one of `sessions` (as session or process group), or carry `marker` ("NAME=value") in
    the environment they were started with.

    The marker finds daemons that left the session, the session finds processes that overwrote their environment.
    """
    needle = b"\0" + marker.encode() + b"\0"
    own = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == own:
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The command name may hold anything; the fields behind its last parenthesis are fixed.
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
    """SIGKILL until nothing is found twice in a row; False if something is left after `timeout_s`."""
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
