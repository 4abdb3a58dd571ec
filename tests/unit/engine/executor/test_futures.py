"""Futures of calls: the first completion counts, and a timeout names the workers."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from baton_engine.executor.futures import complete, reject, resolve, wait_for_answers


def test_only_the_first_completion_has_an_effect() -> None:
    future: Future[int] = Future()
    resolve(future, 1)
    reject(future, ValueError())
    complete(future, lambda: 2)
    assert future.result() == 1


def test_an_exception_of_the_computation_fails_the_future() -> None:
    future: Future[int] = Future()
    complete(future, lambda: 1 // 0)
    assert isinstance(future.exception(), ZeroDivisionError)


def test_a_timeout_names_the_workers_without_an_answer() -> None:
    with pytest.raises(TimeoutError, match=r"load was not answered within 0.01 s by worker \[1\]"):
        wait_for_answers(Future(), 0.01, "load", 3, {0, 2})


def test_a_timeout_error_of_a_worker_keeps_its_message() -> None:
    future: Future[int] = Future()
    reject(future, TimeoutError("the store did not answer"))
    with pytest.raises(TimeoutError, match="the store did not answer"):
        wait_for_answers(future, 1.0, "join", 1, set())
