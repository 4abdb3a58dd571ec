"""Messages between an executor and its worker processes.

The messages are pickled. This is safe because sender and receiver run in the same pod.
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
from baton_protocol.options.config import EngineConfig


@dataclass(slots=True)
class StartWorker:
    """The first message to a worker process: which worker to create.

    The executor sends this message through the worker's pipe, and later commands through the ring
    in shared memory.
    """

    config: EngineConfig
    instance_id: str
    rank: int
    #: Whether this worker returns the results of steps. Other workers report only failures and
    #: transfers that have ended.
    is_output_rank: bool
    #: File descriptor of the ring's shared memory.
    ring_fd: int
    #: Number of readers, number of slots and bytes per slot of the ring.
    ring_geometry: tuple[int, int, int]
    log_level: int
    #: Read end of a pipe. Each line is an argument of the worker's `interrupt`: the nonce of a
    #: generation, or empty. The worker process makes this call even during a step.
    interrupt_fd: int
    #: CPUs to which the process is bound. Empty: the CPUs of the parent.
    cpus: frozenset[int] = frozenset()


# Commands, broadcast through the ring


@dataclass(slots=True)
class ExecuteModel:
    """Command: run the model for one step."""

    step: SchedulerOutput


@dataclass(slots=True)
class SampleTokens:
    """Command: sample from the logits of the last `ExecuteModel`."""

    #: Number of the step. The executor counts its steps from 0.
    number: int
    grammar: GrammarOutput | None


@dataclass(slots=True)
class Call:
    """Command: call a method of the worker."""

    call_id: int
    method: str
    args: tuple[Any, ...]


@dataclass(slots=True)
class Shutdown:
    """Command: end the worker process."""


# Answers, through the worker's connection


@dataclass(frozen=True, slots=True)
class CommandFailure:
    """A worker's exception in a form that can be pickled."""

    rank: int
    #: Type and message, one line.
    summary: str
    traceback: str
    #: Type, reason and message of a ConfigurationError. None: the exception is of another type.
    configuration: tuple[type[ConfigurationError], str, str] | None = None
    #: Whether the exception was a GroupBrokenError.
    group_broken: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> CommandFailure:
        """Create the failure for an exception that worker `rank` raised."""
        configuration = (
            (type(error), error.reason, error.message)
            if isinstance(error, ConfigurationError)
            else None
        )
        text = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}"
        return cls(rank, summary, text, configuration, isinstance(error, GroupBrokenError))

    def exception(self, doing: str) -> Exception:
        """Return the exception that the executor raises for this failure.

        ConfigurationError and GroupBrokenError keep their type. Any other exception becomes a
        WorkerError with the traceback.

        Args:
            doing: the operation that failed, for the message.
        """
        if self.group_broken:
            return GroupBrokenError(f"worker {self.rank}, in {doing}: {self.summary}")
        if self.configuration is None:
            return WorkerError(
                f"worker {self.rank} failed in {doing}: {self.summary}\n{self.traceback}"
            )
        kind, reason, message = self.configuration
        error = kind.__new__(kind)  # subclasses of ConfigurationError have different constructors
        ConfigurationError.__init__(error, reason, message)
        return error


@dataclass(slots=True)
class Started:
    """Answer: the worker was created, and its process now reads commands."""


@dataclass(slots=True)
class StartFailed:
    """Answer: the worker could not be created."""

    failure: CommandFailure


@dataclass(slots=True)
class StepDone:
    """Answer: the results of a step. Only the rank `startup.output_rank` sends this answer."""

    number: int
    output: ModelRunnerOutput


@dataclass(slots=True)
class TransfersEnded:
    """Answer: KV transfers that ended on a worker other than `startup.output_rank`."""

    output: ConnectorOutput


@dataclass(slots=True)
class StepFailed:
    """Answer: a step failed, and the engine cannot continue."""

    failure: CommandFailure


@dataclass(slots=True)
class StepBroken:
    """Answer: the workers dropped a step because the expert-parallel group broke.

    Later steps may follow. Only the output rank (`startup.output_rank`) sends this message.
    """

    number: int
    failure: CommandFailure


@dataclass(slots=True)
class CallDone:
    """Answer: the result of a `Call` on one worker."""

    call_id: int
    result: Any


@dataclass(slots=True)
class CallFailed:
    """Answer: the exception of a `Call` on one worker."""

    call_id: int
    failure: CommandFailure


@dataclass(slots=True)
class Wakeup:
    """Answer: the worker's KV connector has something to report in the next step."""


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
