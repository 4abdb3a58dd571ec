"""Completes futures, and waits for the answers of workers.

Of several calls that complete one future, only the first has an effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def resolve(future: Future[Any], result: Any) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def complete(future: Future[Any], compute: Callable[[], Any]) -> None:
    """Complete the future with the result or the exception of `compute`."""
    try:
        result = compute()
    except BaseException as error:
        reject(future, error)
    else:
        resolve(future, result)


def wait_for_answers(
    future: Future[_Result],
    timeout_s: float | None,
    method: str,
    num_workers: int,
    answered: Container[int],
) -> _Result:
    """Wait until all workers have answered a call, and return the call's result.

    Args:
        future: completes when all workers have answered.
        timeout_s: limit for all answers. None: no limit.
        method: name of the called method, for the error message.
        num_workers: number of workers.
        answered: ranks of the workers that have answered, for the error message.

    Raises:
        TimeoutError: not all workers answered in time.
        Exception: the exception of `future`.
    """
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # it ended after the timeout, or a worker raised TimeoutError
            return future.result()
        missing = [rank for rank in range(num_workers) if rank not in answered]
        raise TimeoutError(
            f"{method} was not answered within {timeout_s} s by worker {missing}"
        ) from None
