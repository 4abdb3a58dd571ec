"""Show the status of a service on a terminal, for `baton status` and `baton up`."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton_local.kv_bytes import format_kv_bytes
from baton_local.service_status import ServiceCondition, ServiceStatus

#: Width in columns of output that is not printed on a terminal.
PIPED_WIDTH = 1000
_STYLES = {"True": "green", "False": "red", "Unknown": "yellow"}


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that wraps long lines only if its output is a terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PIPED_WIDTH)


def service_tables(status: ServiceStatus, elapsed_s: float | None = None) -> RenderableType:
    """Return the tables of pods and conditions.

    Args:
        elapsed_s: seconds since the start of `baton up`, shown in the heading. None: not shown.
    """
    pids = any(pod.pid for pod in status.pods)
    pods = Table(title=None, box=None, pad_edge=False, header_style="bold")
    for column in (
        "POD",
        "ROLE",
        "ADDRESS",
        "PHASE",
        "READY",
        "RESTARTS",
        *(["PID"] if pids else []),
        "REASON",
    ):
        pods.add_column(column, overflow="fold")  # a truncated name cannot be copied
    for pod in status.pods:
        ready = Text("yes", "green") if pod.ready else Text("no", "yellow")
        # As Text, because a plain string with brackets would be parsed as markup.
        plain = (pod.name, pod.role, pod.ip, pod.phase)
        pid = [str(pod.pid or "")] if pids else []
        pods.add_row(*map(Text, plain), ready, str(pod.restarts), *pid, Text(pod.reason))
    conditions = Table(title=None, box=None, pad_edge=False, header_style="bold")
    for column in ("CONDITION", "STATUS", "REASON", "MESSAGE"):
        conditions.add_column(column)
    for condition in status.conditions:
        state = Text(condition.status, _STYLES.get(condition.status, ""))
        conditions.add_row(condition.type, state, condition.reason, Text(condition.message))
    heading = Text(f"{status.namespace}/{status.service}", "bold")
    if elapsed_s is not None:
        heading.append(f"   {elapsed_s:.0f} s", "dim")
    return Group(heading, pods, Text(""), conditions)


def print_status(status: ServiceStatus, manifest: str) -> None:
    """Print the output of `baton status`. `manifest` is the path of the service's YAML file."""
    console = make_console()
    if status.exists:
        with console.capture() as tables:
            console.print(service_tables(status))
        for line in tables.get().splitlines():
            console.out(line.rstrip(), highlight=False)  # without the padding of the last column
        console.out(f"\nendpoint    {status.endpoint}", highlight=False)
    if status.ingress:
        console.out(f"ingress     {status.ingress}", highlight=False)
    console.out(f"kubeconfig  {status.kubeconfig}", highlight=False)
    console.out(f"manifest    {manifest}", highlight=False)
    for pod in status.pods:
        if pod.kv_bytes:
            console.out(f"KV moved    {format_kv_bytes(pod.kv_bytes)}, {pod.name}", highlight=False)


class ProgressDisplay:
    """Shows the state of a service while `baton up` runs.

    On a terminal, a table is updated. Otherwise a line is printed for each changed condition.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._live: Live | None = None
        self._seen: dict[str, ServiceCondition] = {}

    def __enter__(self) -> None:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8)
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of `baton up`."""
        return time.monotonic() - self._started

    def show(self, status: ServiceStatus) -> None:
        """Show `status`.

        On a terminal, update the table. Otherwise, print a line for each condition that has changed
        since the previous call.
        """
        if self._live is not None:
            self._live.update(service_tables(status, self.elapsed_s))
        for condition in status.conditions:
            if self._live is None and self._seen.get(condition.type) != condition:
                line = (
                    f"{self.elapsed_s:7.1f} s  {condition.type}={condition.status} "
                    f"{condition.reason}: {condition.message}"
                )
                self._console.out(line, highlight=False)
            self._seen[condition.type] = condition
