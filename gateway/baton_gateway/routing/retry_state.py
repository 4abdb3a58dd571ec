"""The attempts of one sequence on decode engines, and why they failed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from baton_gateway.routing.sequence import Placement, Sequence
from baton_protocol.engine_messages import ErrorCode

#: Number of failed attempts in a row without a new token, after which the client gets the error.
#: The sequence itself may crash engines, and more attempts would crash more engines.
MAX_FAILURES = 5


class AttemptError(Exception):
    """Raised when an attempt fails on its engine, and another engine may complete the sequence.

    Args:
        code: the engine's error code; None if the engine is dead or stopped answering.
        reason: name of the failure in the metrics, if there is no error code.
    """

    def __init__(
        self, message: str, code: ErrorCode | None, *, reason: str = "engine_lost"
    ) -> None:
        super().__init__(message)
        self.code = code
        #: The label `reason` of the retries in the metrics.
        self.reason = reason if code is None else code.name.lower()

    @property
    def is_engine_gone(self) -> bool:
        """Whether the engine is dead or draining, or stopped answering."""
        return self.code in (None, ErrorCode.DRAINING)

    @property
    def ends_group(self) -> bool:
        """Whether the failure affects all samples of the group, and not only this sample."""
        return self.is_engine_gone or self.code is ErrorCode.KV_LOAD


@dataclass
class RetryState:
    """The attempts of one sequence so far: their number, the last failure, the engines used."""

    sequence: Sequence
    #: The only data-parallel rank that may run the sequence; None if any rank may.
    rank: int | None
    num_attempts: int = 0
    #: Failed attempts in a row without a new token. Refusals by draining and full engines do not
    #: count, because they do not depend on the sequence.
    num_failures: int = 0
    last_failure: AttemptError | None = None
    excluded: set[int] = field(default_factory=set)  # `EngineClient.ready_epoch` of engines tried
    compatibility_hash: str | None = None  # of the last engine tried
    last_placement: Placement | None = None
    stalled_since: float = 0.0  # monotonic time of the first failure since the last token

    @property
    def has_failed_too_often(self) -> bool:
        """Whether `num_failures` has reached MAX_FAILURES, so that no other engine is tried."""
        return self.num_failures >= MAX_FAILURES

    @property
    def is_waiting_for_capacity(self) -> bool:
        """Whether the sequence waits for capacity, because it has tokens and its engine was full.

        "Its engine" is the engine of the last attempt. A sequence without generated tokens does
        not wait: it fails if all engines are full.
        """
        failure = self.last_failure
        return (
            failure is not None and failure.code is ErrorCode.OVERLOADED and self.sequence.has_begun
        )

    def on_sent(self, placement: Placement) -> None:
        """Record that an attempt begins on the engine of `placement`."""
        self.num_attempts += 1
        self.last_placement = placement
        self.excluded.add(placement.ready_epoch)
        self.compatibility_hash = placement.member.ready_client.init.compatibility_hash

    def on_failed(self, error: AttemptError, *, has_progressed: bool) -> None:
        """Record that the last attempt failed with `error`.

        Args:
            has_progressed: whether the attempt generated new tokens.
        """
        if has_progressed or self.last_failure is None:
            self.stalled_since = time.monotonic()
        self.last_failure = error
        self.sequence.has_failed = True
        if has_progressed:
            self.num_failures = 0
        elif error.code is not ErrorCode.DRAINING and not self.is_waiting_for_capacity:
            self.num_failures += 1
        if self.sequence.has_begun or error.is_engine_gone:
            self.rank = None  # the next topology may lack this rank, and accepted work must go on
