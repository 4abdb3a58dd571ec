"""What an executor and its worker processes tell each other. Pickled: both ends are processes of one pod."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.executor.base import WorkerError
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.models.errors import ConfigurationError
from baton_kv_transfer.connector import ConnectorOutput
from baton_protocol.config import EngineConfig


@dataclass(slots=True)
class StartWorker:
    """The first message to a worker process, through its connection."""

    config: EngineConfig
    instance_id: str
    rank: int
    is_output_rank: bool
    """It answers steps; the others only say what went wrong, and which transfers ended."""
    ring_fd: int
    ring_geometry: tuple[int, int, int]
    """Readers, slots, bytes per slot."""
    log_level: int
    interrupt_fd: int
    """Of a pipe: each line is a nonce, perhaps empty, for the worker's `interrupt`, which does not wait for the step."""
    cpus: frozenset[int] = frozenset()
    """Those it keeps to; empty: the parent's."""


# Commands, broadcast through the ring


@dataclass(slots=True)
class ExecuteModel:
    step: SchedulerOutput


@dataclass(slots=True)
class SampleTokens:
    number: int
    """Counts steps from 0."""
    grammar: GrammarOutput | None


@dataclass(slots=True)
class Call:
    call_id: int
    method: str
    args: tuple[Any, ...]


@dataclass(slots=True)
class Shutdown:
    pass


# Answers, through the worker's connection


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's exception. Exceptions themselves need not survive pickling."""

    rank: int
    summary: str
    """Type and message, one line."""
    traceback: str
    configuration: tuple[type[ConfigurationError], str, str] | None = None
    """Type, reason and message, if it was one."""
    group_broken: bool = False
    """It was a GroupBrokenError."""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        configuration = (
            (type(error), error.reason, error.message)
            if isinstance(error, ConfigurationError)
            else None
        )
        text = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}"
        return cls(rank, summary, text, configuration, isinstance(error, GroupBrokenError))

    def exception(self, doing: str) -> Exception:
        """What the executor raises: the same ConfigurationError or GroupBrokenError, or a WorkerError with the traceback.

        Args:
            doing: what the worker was asked for.
        """
        if self.group_broken:
            return GroupBrokenError(f"worker {self.rank}, in {doing}: {self.summary}")
        if self.configuration is None:
            return WorkerError(
                f"worker {self.rank} failed in {doing}: {self.summary}\n{self.traceback}"
            )
        kind, reason, message = self.configuration
        error = kind.__new__(kind)  # constructors of its subclasses differ
        ConfigurationError.__init__(error, reason, message)
        return error


@dataclass(slots=True)
class Started:
    """The worker's object exists; it waits for commands."""


@dataclass(slots=True)
class StartFailed:
    failure: Failure


@dataclass(slots=True)
class StepDone:
    number: int
    output: ModelRunnerOutput


@dataclass(slots=True)
class TransfersEnded:
    """Of a worker that does not answer steps: what its connector had to report with one."""

    output: ConnectorOutput


@dataclass(slots=True)
class StepFailed:
    failure: Failure


@dataclass(slots=True)
class StepBroken:
    """The step is dropped, for the expert group broke; on all workers alike, and others may follow."""

    number: int
    failure: Failure


@dataclass(slots=True)
class CallDone:
    call_id: int
    result: Any


@dataclass(slots=True)
class CallFailed:
    call_id: int
    failure: Failure


@dataclass(slots=True)
class Wakeup:
    """The next step would find something new in the worker's connector."""


Command = ExecuteModel | SampleTokens | Call | Shutdown
Answer = (
    Started
    | StartFailed
    | StepDone
    | TransfersEnded
    | StepFailed
    | StepBroken
    | CallDone
    | CallFailed
    | Wakeup
)
