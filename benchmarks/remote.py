"""Objects in processes of their own, so that each candidate of a benchmark runs undisturbed.

Candidates in one process disturb each other: with the bandwidth measured in the engine's process,
batch-1 decode made 53 tokens per second; in a process of its own it made 70. libgomp counts the
threads of all pools, including idle ones, and spins less if they outnumber the cores.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Remote:
    """The object `factory(*args, **options)` in a new process."""

    def __init__(self, factory: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Start the process. Raises RuntimeError if the factory raises."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, factory, args, options), daemon=True
        )
        self._process.start()
        theirs.close()
        self._answer()

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the object and return its result.

        Raises:
            EOFError: the process died.
            TimeoutError: the method did not return in time. The process has been killed.
            RuntimeError: the method raised.
        """
        self._connection.send((method, args))
        if not self._connection.poll(timeout_s):
            self._process.kill()
            raise TimeoutError(f"{method} did not return within {timeout_s:g} s")
        return self._answer()

    def close(self) -> None:
        """Call the object's `close`, if it has one, and end the process."""
        if self._process.is_alive():
            with contextlib.suppress(BrokenPipeError):  # the process is ending
                self._connection.send(None)
        self._process.join(60)

    def _answer(self) -> Any:
        failure, result = self._connection.recv()
        if failure is not None:
            raise failure
        return result


def _serve(
    connection: Connection,
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    try:
        subject = factory(*args, **options)
        connection.send((None, None))
        while (message := connection.recv()) is not None:
            method, method_args = message
            connection.send((None, getattr(subject, method)(*method_args)))
    except Exception as error:
        connection.send((RuntimeError(f"{type(error).__name__}: {error}"), None))
        raise
    if hasattr(subject, "close"):
        subject.close()
