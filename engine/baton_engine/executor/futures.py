"""Completes futures. Of several calls for one future, only the first has an effect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any


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
