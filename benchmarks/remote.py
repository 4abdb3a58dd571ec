"""Runs objects in separate processes, so that candidates of a benchmark do not affect each other.

Batch-1 decode generated 53 tokens per second when the engine's process had also measured the
bandwidth. With the measurement in another process, batch-1 decode generated 70. The cause is
libgomp, which counts the threads of all pools, including idle threads. libgomp spins less if the
threads outnumber the cores.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Remote:
    """A proxy for the object `factory(*args, **options)`, which runs in a new process."""

    def __init__(self, factory: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Start the process and create the object in it.

        Raises:
            RuntimeError: the factory raised an error.
        """
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
        """Call the object's `close`, if the object has one, and wait for the process to end."""
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
