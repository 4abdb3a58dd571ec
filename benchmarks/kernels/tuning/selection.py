"""Chooses launch configurations: tries all candidates and keeps the fastest with a right result.

A kernel's launcher requests the configuration of its shape class from
`baton_kernels.launch_configurations`, which the tuner overrides. So the tuner cannot measure one
shape class and record another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from baton_kernels.launch_configurations import Configuration, Lookup, overriding

T = TypeVar("T")
Key = tuple[str, str]  #: (operation, shape class).
GAIN = 0.02  #: A candidate must be faster than the default by this fraction. Less is noise.


@dataclass
class Choice:
    """The fastest configuration of one shape class of an operation."""

    operation: str
    shape_class: str
    config: dict[str, int] | None  #: None: the default is the fastest.
    seconds: float
    default_seconds: float
    num_tried: int
    wrong: list[dict[str, int]]  #: Candidates with wrong results, which are bugs of the kernel.
    num_failed: int  #: Candidates that cannot run here, for example with too much shared memory.
    num_untried: int = 0  #: Candidates that were not tried before the deadline.


@dataclass
class Subject:
    """One launch to tune, or several that are tuned together."""

    name: str
    call: Callable[[], object]
    correct: Callable[[], bool]  #: Runs the launch and returns whether the result is right.
    seconds: Callable[[], float]  #: Returns the time of a call.
    #: (operation, shape class) -> configurations to try.
    candidates: Callable[[str, str], Iterable[Configuration]]


def requested_by(call: Callable[[], object]) -> dict[Key, Configuration]:
    """Return the configurations that `call` requests, with the default of each."""
    requested: dict[Key, Configuration] = {}

    def record(operation: str, shape_class: str, default: Configuration) -> Configuration:
        requested[operation, shape_class] = default
        return default

    with overriding(record):
        call()
    return requested


def choose(
    subject: Subject,
    deadline: float,
    *,
    num_threads: int = 0,
    now: Callable[[], float] = time.monotonic,
) -> list[Choice]:
    """Return the fastest configuration of each shape class of the subject.

    The shape classes are tuned one after the other. Classes that are already tuned use their best
    configuration.

    Args:
        subject: the launch.
        deadline: time on the clock `now` after which no candidate is tried.
        num_threads: candidates that are compiled at the same time, before any candidate is timed.
            0: each candidate is compiled when it is tried.
        now: the clock.

    Raises:
        RuntimeError: the default configuration gives a wrong result.
    """
    requested = requested_by(subject.call)
    best = dict(requested)
    if not _with(best, subject.correct):
        raise RuntimeError(f"{subject.name}: the default configuration gives a wrong result")
    choices = []
    for key, default in requested.items():
        candidates = [
            one
            for one in subject.candidates(*key)
            if set(one) <= set(default) and {**default, **one} != default
        ]
        trials = [{**best, key: {**default, **one}} for one in candidates]
        _compile(subject, trials, num_threads, lambda: now() > deadline)
        default_seconds = _with(best, subject.seconds)
        choice = Choice(*key, None, default_seconds, default_seconds, 0, [], 0)
        for candidate in candidates:
            if now() > deadline:
                choice.num_untried += 1
                continue
            trial = {**best, key: {**default, **candidate}}
            choice.num_tried += 1
            try:
                if not _with(trial, subject.correct):
                    choice.wrong.append(dict(candidate))
                    continue
                seconds = _with(trial, subject.seconds)
            except Exception:  # an error of the compiler, the driver or the launcher
                choice.num_failed += 1
                continue
            if seconds < min(choice.seconds, (1 - GAIN) * default_seconds):
                choice.seconds, choice.config = seconds, dict(trial[key])
        if choice.config is not None:
            best[key] = choice.config
        choices.append(choice)
    return choices


def _with(configs: Mapping[Key, Configuration], call: Callable[[], T]) -> T:
    with overriding(_lookup_in(configs)):
        return call()


def _lookup_in(configs: Mapping[Key, Configuration]) -> Lookup:
    return lambda operation, shape_class, default: configs.get((operation, shape_class), default)


def _compile(
    subject: Subject,
    trials: Sequence[Mapping[Key, Configuration]],
    num_threads: int,
    is_late: Callable[[], bool],
) -> None:
    """Compile the candidates in `num_threads` threads, so that Triton's cache contains them.

    Errors are ignored, because a candidate that fails here fails again when it is tried.
    """

    def attempt(trial: Mapping[Key, Configuration]) -> None:
        if is_late():
            return
        try:
            _with(trial, subject.call)
        except Exception:
            return

    if num_threads:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(attempt, trials))
