"""Tables of the pods and conditions of one service."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton_local.service import ServiceStatus

_STYLES = {"True": "green", "False": "red", "Unknown": "yellow"}


def service_tables(status: ServiceStatus, elapsed_s: float | None = None) -> RenderableType:
    """Build the tables of pods and conditions. `elapsed_s` is shown in the heading."""
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
