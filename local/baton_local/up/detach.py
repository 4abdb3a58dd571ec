"""`baton up --detach`: run `baton up` in the background.

The command returns when the service has answered its first request.
"""

from __future__ import annotations

import subprocess
import time

from rich.console import Console
from rich.markup import escape

from baton_local.state_dir import ClusterInfo, StateDir

#: Time for `baton up` to stop its cluster after a failure, before SIGKILL.
STOP_TIMEOUT_S = 60.0


class NoAnswerError(Exception):
    """Raised when `baton up` has ended before its service answered, or no answer came in time."""


def run_detached(command: list[str], timeout_s: float, state: StateDir, console: Console) -> int:
    """Start `baton up` in a new session, and wait for the first answer of its service.

    Args:
        command: the command line of `baton up` without --detach.
        timeout_s: longest time from the start of `baton up` to the first answer of its service.

    Returns:
        The exit status: 0 after the answer, else 1. If the answer does not come, this function
        stops the process of `baton up` that it started.
    """
    if (pid := state.supervisor()) is not None:
        console.print(
            f"[red]baton up:[/] a local cluster is already running (process {pid}); "
            "`baton down` ends it"
        )
        return 1
    state.make()
    log_path = state.logs / "supervisor.log"
    with open(log_path, "wb") as log:
        supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    info: ClusterInfo | None = None
    try:
        info = _wait_for_answer(supervisor, state, timeout_s)
    except NoAnswerError as error:
        console.print(f"[red]baton up:[/] {escape(str(error))}; `baton up` printed:")
    finally:
        if info is None:  # also after Ctrl-C, which does not reach the supervisor's session
            _stop(supervisor)
    if info is None:
        console.out(log_path.read_text(errors="replace"))
        return 1
    console.out(
        f"Ready: {info.endpoint}\nexport KUBECONFIG={info.kubeconfig}\n"
        f"To change it: edit {info.file}, then kubectl apply -f {info.file}\n`baton down` ends it.",
        highlight=False,
    )
    return 0


def _wait_for_answer(
    supervisor: subprocess.Popen[bytes], state: StateDir, timeout_s: float
) -> ClusterInfo:
    """Wait until the service has answered. Return the ClusterInfo that `baton up` wrote.

    Args:
        supervisor: the process of `baton up`.

    Raises:
        NoAnswerError: `baton up` has ended, or `timeout_s` has passed.
    """
    deadline = time.monotonic() + timeout_s
    while supervisor.poll() is None:
        info = state.read_info()
        if info is not None and info.endpoint:
            return info
        if time.monotonic() > deadline:
            missing = (
                "the cluster has not started"
                if info is None
                else f"{info.namespace}/{info.service} has not answered"
            )
            raise NoAnswerError(f"{missing} within {timeout_s:g} s (see --timeout)")
        time.sleep(0.2)
    raise NoAnswerError("the cluster has ended without an answer")


def _stop(supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.terminate()
    try:
        supervisor.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()  # its components end with it
        supervisor.wait()
