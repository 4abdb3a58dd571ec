"""The failures that count against a sequence, and those that do not."""

from __future__ import annotations

import pytest

from baton_gateway.routing.retry_state import MAX_FAILURES, AttemptError, RetryState
from baton_gateway.routing.sequence import Sequence
from baton_protocol.engine_messages import ErrorCode
from baton_protocol.sampling_params import SamplingParams


def state(generated: list[int] | None = None, rank: int | None = None) -> RetryState:
    one = Sequence("r", [1], SamplingParams(), generated_token_ids=generated or [])
    return RetryState(one, rank)


def test_failures_without_progress_end_a_sequence_and_progress_forgives_them() -> None:
    attempts = state([7])
    for _ in range(MAX_FAILURES - 1):
        attempts.on_failed(AttemptError("lost", None), has_progressed=False)
    assert not attempts.has_failed_too_often
    attempts.on_failed(AttemptError("lost", None), has_progressed=True)
    assert attempts.num_failures == 0
    for _ in range(MAX_FAILURES):
        attempts.on_failed(AttemptError("lost", None), has_progressed=False)
    assert attempts.has_failed_too_often


@pytest.mark.parametrize(
    ("code", "generated", "counts"),
    [
        (None, [7], True),
        (ErrorCode.KV_LOAD, [7], True),
        (ErrorCode.DRAINING, [7], False),
        (ErrorCode.OVERLOADED, [7], False),
        (ErrorCode.OVERLOADED, [], True),
    ],
)
def test_refusals_that_do_not_depend_on_the_sequence_do_not_count(
    code: ErrorCode | None, generated: list[int], counts: bool
) -> None:
    attempts = state(generated)
    attempts.on_failed(AttemptError("refused", code), has_progressed=False)
    assert attempts.num_failures == counts
    assert attempts.is_waiting_for_capacity == (code is ErrorCode.OVERLOADED and bool(generated))
    assert attempts.sequence.has_failed


@pytest.mark.parametrize(
    ("code", "generated", "rank"),
    [
        (ErrorCode.OVERLOADED, [], 3),
        (ErrorCode.OVERLOADED, [7], None),
        (ErrorCode.DRAINING, [], None),
        (None, [], None),
    ],
)
def test_the_requested_rank_is_kept_until_work_began_or_the_engine_is_gone(
    code: ErrorCode | None, generated: list[int], rank: int | None
) -> None:
    attempts = state(generated, rank=3)
    attempts.on_failed(AttemptError("x", code), has_progressed=False)
    assert attempts.rank == rank


@pytest.mark.parametrize(
    ("code", "reason", "is_gone", "ends_group"),
    [
        (None, "stalled", True, True),
        (ErrorCode.DRAINING, "draining", True, True),
        (ErrorCode.KV_LOAD, "kv_load", False, True),
        (ErrorCode.OVERLOADED, "overloaded", False, False),
    ],
)
def test_the_code_decides_whether_the_engine_and_the_group_are_lost(
    code: ErrorCode | None, reason: str, is_gone: bool, ends_group: bool
) -> None:
    error = AttemptError("x", code, reason="stalled")
    assert (error.reason, error.is_engine_gone, error.ends_group) == (reason, is_gone, ends_group)
