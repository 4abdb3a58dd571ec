"""Chooses launch configurations: tries the candidates one after the other, drops those with wrong results, keeps the fastest.

What is asked for, and under which shape class, the launcher itself says: it asks `baton_kernels.configurations`, and here is who
answers. So the tuner cannot measure one class and write down another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from baton_kernels.configurations import Answer, Configuration, answering

T = TypeVar("T")
#: (operation, shape class).
Key = tuple[str, str]
#: A candidate must be faster than the default by so much: less is noise, and the default needs no
#: entry in a table.
GAIN = 0.02


@dataclass
class Choice:
    """What won for one shape class of one operation."""

    operation: str
    shape_class: str
    #: None: the default.
    config: dict[str, int] | None
    seconds: float
    default_seconds: float
    num_tried: int
    #: Candidates whose results were wrong: bugs of the kernel.
    wrong: list[dict[str, int]]
    #: Candidates that cannot be launched here: too much shared memory, for example.
    num_failed: int
    #: Candidates that time did not suffice for.
    num_untried: int = 0


@dataclass
class Subject:
    """One launch to be tuned, or several that are tuned together."""

    name: str
    call: Callable[[], object]
    #: Calls it and says whether the result is right.
    correct: Callable[[], bool]
    #: How long it takes.
    seconds: Callable[[], float]
    #: By operation and shape class.
    candidates: Callable[[str, str], Iterable[Configuration]]


def asked_by(call: Callable[[], object]) -> dict[Key, Configuration]:
    """What a call asks for, with the default it brings."""
    asked: dict[Key, Configuration] = {}

    def answer(operation: str, shape_class: str, default: Configuration) -> Configuration:
        asked[operation, shape_class] = default
        return default

    with answering(answer):
        call()
    return asked


def choose(
    subject: Subject,
    deadline: float,
    *,
    num_threads: int = 0,
    now: Callable[[], float] = time.monotonic,
) -> list[Choice]:
    """Tunes what the subject asks for, one shape class after the other, those before at their best.

    Args:
        deadline: as `now` says; nothing more is tried after it.
        num_threads: that many candidates are compiled at a time, before any of them is timed. 0: each when it is tried.

    Raises:
        RuntimeError: if the default itself gives a wrong result: then there is nothing to compare with.
    """
    asked = asked_by(subject.call)
    best = dict(asked)
    if not _with(best, subject.correct):
        raise RuntimeError(f"{subject.name}: the default configuration gives a wrong result")
    choices = []
    for key, default in asked.items():
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
            except Exception:  # of many kinds: the compiler's, the driver's, the launcher's
                choice.num_failed += 1
                continue
            if seconds < min(choice.seconds, (1 - GAIN) * default_seconds):
                choice.seconds, choice.config = seconds, dict(trial[key])
        if choice.config is not None:
            best[key] = choice.config
        choices.append(choice)
    return choices


def _with(answers: Mapping[Key, Configuration], call: Callable[[], T]) -> T:
    with answering(_answer_with(answers)):
        return call()


def _answer_with(answers: Mapping[Key, Configuration]) -> Answer:
    return lambda operation, shape_class, default: answers.get((operation, shape_class), default)


def _compile(
    subject: Subject,
    trials: Sequence[Mapping[Key, Configuration]],
    num_threads: int,
    is_late: Callable[[], bool],
) -> None:
    """Fills Triton's cache. What fails here fails again, and is counted, when it is tried."""

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
