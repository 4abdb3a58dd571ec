"""Waiting for conditions, with a deadline and a message that says what was missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(probe: Callable[[], T], *, timeout_s: float, what: str, every_s: float = 0.1) -> T:
    """The first true value of `probe`. An AssertionError inside counts as not yet, and its text goes into the failure."""
    deadline = time.monotonic() + timeout_s
    while True:
        last: object = None
        try:
            if value := probe():
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; last seen: {last}")
        time.sleep(every_s)
