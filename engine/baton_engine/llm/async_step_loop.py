"""The thread of `AsyncLLM`, which runs an engine core and hands its outputs to event loops."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from baton_engine.core.engine_core import EngineCore
from baton_engine.llm.step_loop import IDLE_S
from baton_protocol.engine_messages import EngineCoreOutput, EngineCoreRequest

_Result = TypeVar("_Result")
_Item = EngineCoreOutput | Exception


class OutputStream:
    """Passes the outputs of one prompt's requests from the engine's thread to an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item] = asyncio.Queue()

    def put(self, item: _Item) -> None:
        """Add an output or the engine's failure. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the event loop was closed
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self) -> list[EngineCoreOutput]:
        """Wait for outputs, and return all that have arrived.

        Raises:
            RuntimeError: the engine failed or was closed.
        """
        items = [await self._items.get()]
        while not self._items.empty():
            items.append(self._items.get_nowait())
        outputs: list[EngineCoreOutput] = []
        for item in items:
            if isinstance(item, Exception):
                raise RuntimeError(str(item)) from item
            outputs.append(item)
        return outputs


class AsyncStepLoop:
    """Runs one engine core in a thread. All methods may be called from any thread.

    Args:
        core: the engine core. From now on, only the loop's thread uses the core.
        wakeup: event that is set when the core may have new work.
    """

    def __init__(self, core: EngineCore, wakeup: threading.Event) -> None:
        self._core = core
        self._wakeup = wakeup
        #: Functions to run between two steps. None ends the loop.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine loop", daemon=True)
        self._thread.start()

    def add(self, requests: Sequence[EngineCoreRequest], stream: OutputStream) -> None:
        """Send requests to the engine. `stream` receives their outputs or refusals."""
        self._command(lambda: self._add(requests, stream))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests. Their streams receive no further outputs of these requests."""
        ids = list(request_ids)
        self._command(lambda: self._abort(ids))

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Run `function` in the engine's thread between two steps, and return its result.

        Raises:
            RuntimeError: the engine has failed or is closed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_Result] = loop.create_future()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                set_result = partial(result.set_result, function())
            except Exception as error:
                set_result = partial(result.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(lambda: result.done() or set_result())

        self._command(run)
        return await result

    def close(self) -> None:
        """End the loop, raise an error in all open streams and join the thread. Idempotent."""
        self._commands.put(None)
        self._wakeup.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._has_ended:
                self._commands.put(command)
                self._wakeup.set()
                return
        command()  # the loop was closed, so the command reports `_failure`

    def _run(self) -> None:
        while self._take_commands():
            if self._failure is not None or not self._core.has_requests:
                continue
            try:
                outputs = self._core.step_fn()
            except Exception as error:
                self._fail(RuntimeError(f"the engine failed: {type(error).__name__}: {error}"))
                continue
            for output in outputs:
                self._deliver(output)
            if not outputs and not self._core.made_progress:
                self._wakeup.wait(IDLE_S)
                self._wakeup.clear()
        self._fail(RuntimeError("this AsyncLLM is closed; create a new one"))
        with self._lock:
            self._has_ended = True
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command()

    def _take_commands(self) -> bool:
        """Run the commands that have arrived. Wait for a command if the engine has no work.

        Returns:
            False if the loop must end, otherwise True.
        """
        is_idle = self._failure is not None or not self._core.has_requests
        try:
            while True:
                command = self._commands.get(block=is_idle)
                if command is None:
                    return False
                command()
                is_idle = False
        except queue.Empty:
            return True

    def _add(self, requests: Sequence[EngineCoreRequest], stream: OutputStream) -> None:
        for request in requests:
            if self._failure is not None:
                stream.put(self._failure)
                return
            refusal = self._core.add_request(request)
            if refusal is not None:
                stream.put(refusal)
                return
            self._streams[request.request_id] = stream

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        if self._failure is None:
            self._core.abort_requests(request_ids)

    def _deliver(self, output: EngineCoreOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # the request was aborted
        if output.finished:
            del self._streams[output.request_id]
        stream.put(output)

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        for stream in set(self._streams.values()):
            stream.put(self._failure)
        self._streams.clear()
