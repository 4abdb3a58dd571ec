"""Utility calls: the conversion of untrusted arguments, and the results of methods."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from baton_engine.core.utility_methods import UtilityMethods
from baton_engine.server.utility_calls import UtilityCallError, bind, bind_query, call


class Core:
    """Methods with one result each."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def is_paused(self) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def answers(result: Any, *args: Any) -> list[tuple[Any, str | None]]:
    got: list[tuple[Any, str | None]] = []
    core = cast(UtilityMethods, Core(result))
    call(core, "is_paused", args, lambda *answer: got.append(answer))
    return got


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("shutdown", [], "there is no utility method 'shutdown'"),
        ("__init__", [], "there is no utility method"),
        ("is_paused", [1], "is_paused takes 0 arguments, got 1"),
        ("sleep", [1, "abort", 3], "sleep takes 0 to 2 arguments, got 3"),
        ("sleep", [7], "sleep: "),
        ("reset_prefix_cache", ["yes"], "reset_prefix_cache: "),
    ],
)
def test_invalid_arguments_are_refused_with_the_method(
    method: str, args: list[Any], message: str
) -> None:
    with pytest.raises(UtilityCallError, match=message):
        bind(method, args)


def test_a_query_is_converted_by_name() -> None:
    assert bind_query("sleep", {"level": ["1", "2"], "mode": ["keep"]}) == {
        "level": 2,
        "mode": "keep",
    }
    tags = {"tags": ["weights", "kv_cache"]}
    assert bind_query("wake_up", {"tags": ["weights,kv_cache"]}) == tags
    assert bind_query("wake_up", tags) == tags
    with pytest.raises(UtilityCallError, match="sleep takes level, mode, not depth"):
        bind_query("sleep", {"depth": ["1"]})
    with pytest.raises(UtilityCallError, match="sleep: level: "):
        bind_query("sleep", {"level": ["9"]})


def test_results_and_failures_are_passed_once() -> None:
    assert answers(True) == [(True, None)]
    assert answers(RuntimeError("no memory")) == [(None, "is_paused: no memory")]
    assert answers(True, 1) == [(None, "is_paused takes 0 arguments, got 1")]


@pytest.mark.parametrize(
    ("error", "answer"), [(None, (5, None)), (ValueError("x"), (None, "is_paused: x"))]
)
def test_a_future_is_answered_when_it_is_done(
    error: Exception | None, answer: tuple[Any, str | None]
) -> None:
    future: Future[int] = Future()
    got = answers(future)
    assert got == []
    if error is None:
        future.set_result(5)
    else:
        future.set_exception(error)
    assert got == [answer]
