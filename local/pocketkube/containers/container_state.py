"""The states of a container in the API: waiting, running, terminated."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class Waiting:
    """The container waits for its start or restart."""

    reason: str = "ContainerCreating"
    message: str = ""


@dataclass(frozen=True)
class Running:
    """The main process of the container runs."""

    started_at: datetime


@dataclass(frozen=True)
class Terminated:
    """The main process has ended. After a signal, `exit_code` is 128 + the signal number."""

    exit_code: int
    reason: str
    message: str
    started_at: datetime | None = None
    finished_at: datetime | None = None
    container_id: str = ""


@dataclass
class ContainerState:
    """The state of one container. `ContainerRunner` writes the state, and `pod_status` reads it."""

    state: Waiting | Running | Terminated = field(default_factory=Waiting)
    #: How the previous instance ended; None if there was none.
    last: Terminated | None = None
    restart_count: int = 0
    container_id: str = ""
    #: Whether the container runs and has passed its startup probe, if it has one.
    started: bool = False
    #: Whether the container runs and passes its readiness probe, if it has one.
    ready: bool = False

    @property
    def has_succeeded(self) -> bool:
        """Whether the container has ended with exit code 0 and has not been restarted."""
        return isinstance(self.state, Terminated) and self.state.exit_code == 0

    @property
    def is_ready(self) -> bool:
        """Whether the container runs and passes its readiness probe, if it has one."""
        return isinstance(self.state, Running) and self.ready
