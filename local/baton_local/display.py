"""Tables for people: pods and conditions of one service."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton_local.service import ServiceStatus

_STYLES = {"True": "green", "False": "red", "Unknown": "yellow"}


def service_tables(status: ServiceStatus, elapsed_s: float | None = None) -> RenderableType:
    pods = Table(title=None, box=None, pad_edge=False, header_style="bold")
    for column in ("POD", "ROLE", "ADDRESS", "PHASE", "READY", "RESTARTS", "REASON"):
        pods.add_column(column)
    for pod in status.pods:
        ready = Text("yes", "green") if pod.ready else Text("no", "yellow")
        pods.add_row(pod.name, pod.role, pod.ip, pod.phase, ready, str(pod.restarts), pod.reason)
    conditions = Table(title=None, box=None, pad_edge=False, header_style="bold")
    for column in ("CONDITION", "STATUS", "REASON", "MESSAGE"):
        conditions.add_column(column)
    for condition in status.conditions:
        state = Text(condition.status, _STYLES.get(condition.status, ""))
        conditions.add_row(condition.type, state, condition.reason, condition.message)
    heading = Text(f"{status.namespace}/{status.service}", "bold")
    if elapsed_s is not None:
        heading.append(f"   {elapsed_s:.0f} s", "dim")
    return Group(heading, pods, Text(""), conditions)
