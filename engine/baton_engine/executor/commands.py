"""Messages between an executor and its worker processes.

They are pickled, because both ends are processes of one pod.
"""

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
    #: Whether this worker returns the results of steps. Other workers only report failures and
    #: ended transfers.
    is_output_rank: bool
    ring_fd: int
    #: Readers, slots, bytes per slot.
    ring_geometry: tuple[int, int, int]
    log_level: int
    #: Read end of a pipe. Each line is a nonce, perhaps empty, for the worker's `interrupt`, which
    #: may run during a step.
    interrupt_fd: int
    #: CPUs to which it is bound. Empty: the CPUs of the parent.
    cpus: frozenset[int] = frozenset()


# Commands, broadcast through the ring


@dataclass(slots=True)
class ExecuteModel:
    """Run the model on a step."""

    step: SchedulerOutput


@dataclass(slots=True)
class SampleTokens:
    """Sample from the logits of the last step."""

    #: Counts steps from 0.
    number: int
    grammar: GrammarOutput | None


@dataclass(slots=True)
class Call:
    """Call a method of the worker."""

    call_id: int
    method: str
    args: tuple[Any, ...]


@dataclass(slots=True)
class Shutdown:
    """End the process."""


# Answers, through the worker's connection


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's exception, in a form that survives pickling."""

    rank: int
    #: Type and message, one line.
    summary: str
    traceback: str
    #: Type, reason and message of a ConfigurationError.
    configuration: tuple[type[ConfigurationError], str, str] | None = None
    #: The exception was a GroupBrokenError.
    group_broken: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Describe an exception of a worker."""
        configuration = (
            (type(error), error.reason, error.message)
            if isinstance(error, ConfigurationError)
            else None
        )
        text = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}"
        return cls(rank, summary, text, configuration, isinstance(error, GroupBrokenError))

    def exception(self, doing: str) -> Exception:
        """Return the exception that the executor raises.

        It is the same ConfigurationError or GroupBrokenError, or a WorkerError with the traceback.

        Args:
            doing: the operation that failed.
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
    """The worker's object exists and waits for commands."""


@dataclass(slots=True)
class StartFailed:
    """The worker's object could not be created."""

    failure: Failure


@dataclass(slots=True)
class StepDone:
    """The results of a step, by the output rank."""

    number: int
    output: ModelRunnerOutput


@dataclass(slots=True)
class TransfersEnded:
    """The connector's report of a worker that is not the output rank."""

    output: ConnectorOutput


@dataclass(slots=True)
class StepFailed:
    """A step failed, and the engine cannot continue."""

    failure: Failure


@dataclass(slots=True)
class StepBroken:
    """The step is dropped on all workers, because the expert-parallel group broke.

    Other steps may follow.
    """

    number: int
    failure: Failure


@dataclass(slots=True)
class CallDone:
    """The result of a call."""

    call_id: int
    result: Any


@dataclass(slots=True)
class CallFailed:
    """The exception of a call."""

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
