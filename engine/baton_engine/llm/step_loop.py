"""The loop of the offline API, which runs an engine core until all requests have ended."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from tqdm import tqdm

from baton_engine.core.engine_core import EngineCore
from baton_engine.llm.collectors import Collector, check_output
from baton_protocol.engine_messages import EngineCoreOutput

#: Maximum wait after a step that had nothing to do. A wakeup ends the wait earlier.
IDLE_S = 0.05

ProgressBar = bool | Callable[..., "tqdm[Any]"]


class StepLoop:
    """Runs requests on one engine core. Only one thread may use the loop at a time.

    Args:
        wakeup: event that other threads set when the core may have new work.
    """

    def __init__(self, core: EngineCore, wakeup: threading.Event) -> None:
        self._core = core
        self._wakeup = wakeup
        self._failure = ""

    def run(self, collectors: Sequence[Collector], progress: ProgressBar) -> None:
        """Run all requests of `collectors` until they have ended.

        After an exception, the requests that have not ended are aborted, unless the engine has
        failed.

        Args:
            progress: True shows a progress bar on stderr. A function is called with tqdm's
                arguments and returns the bar.

        Raises:
            ValueError: a prompt or its parameters cannot be served.
            RuntimeError: the engine failed, in this call or in an earlier call.
            KeyboardInterrupt: Ctrl-C was pressed. The current step ends first, unless Ctrl-C is
                pressed again.
        """
        if self._failure:
            raise RuntimeError(f"the engine failed earlier ({self._failure}); make a new LLM")
        running: dict[str, tuple[int, Collector]] = {}
        with _interrupts_after_steps() as raise_delayed:
            try:
                self._add(collectors, running)
                with _progress_bar(progress, len(collectors)) as bar:
                    left = [len(collector.requests) for collector in collectors]
                    while running:
                        raise_delayed()
                        for index in self._step_and_collect(running, bar):
                            left[index] -= 1
                            if left[index] == 0:
                                bar.count(prompts=1, input=len(collectors[index].prompt.token_ids))
            finally:
                self._abort(running)

    def _add(
        self, collectors: Sequence[Collector], running: dict[str, tuple[int, Collector]]
    ) -> None:
        for index, collector in enumerate(collectors):
            for request in collector.requests:
                refusal = self._core.add_request(request)
                if refusal is not None:
                    check_output(refusal, f"prompt {index}")
                running[request.request_id] = index, collector

    def _step_and_collect(
        self, running: dict[str, tuple[int, Collector]], bar: _Bar
    ) -> Iterator[int]:
        """Run one step, and pass its outputs to the collectors in `running`.

        Yields the prompt's index for each request that ended in this step.
        """
        for output in self._run_step():
            if output.request_id not in running:
                continue  # the request has ended already, at a stop string
            index, collector = running[output.request_id]
            if output.error:
                del running[output.request_id]
                check_output(output, f"prompt {index}")
            before = collector.num_generated
            ended = collector.push(output)
            bar.count(output=collector.num_generated - before)
            if ended:
                del running[output.request_id]
                if not output.finished:
                    self._core.abort_requests([output.request_id])
                yield index

    def _run_step(self) -> list[EngineCoreOutput]:
        """Run one step and return its outputs. If there was no work, wait briefly for a wakeup."""
        try:
            outputs = self._core.step_fn()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"the engine failed: {self._failure}") from error
        except BaseException:  # a second Ctrl-C
            self._failure = "a step was interrupted in the middle"
            raise
        if not outputs and not self._core.made_progress:
            self._wakeup.wait(IDLE_S)
            self._wakeup.clear()
        return outputs

    def _abort(self, running: dict[str, tuple[int, Collector]]) -> None:
        if self._failure:
            return
        self._core.abort_requests(list(running))
        while self._core.has_requests:  # steps in flight still hold blocks
            self._run_step()


class _Bar:
    """A progress bar like vLLM's: finished prompts, and input and output tokens per second."""

    def __init__(self, bar: tqdm[Any] | None) -> None:
        self._bar = bar
        self._started = time.perf_counter()
        self._input = 0
        self._output = 0

    def count(self, *, prompts: int = 0, input: int = 0, output: int = 0) -> None:
        self._input += input
        self._output += output
        if self._bar is None or not prompts:
            return
        elapsed_s = max(time.perf_counter() - self._started, 1e-9)
        self._bar.postfix = (
            f"est. speed input: {self._input / elapsed_s:.2f} toks/s, "
            f"output: {self._output / elapsed_s:.2f} toks/s"
        )
        self._bar.update(prompts)


@contextlib.contextmanager
def _progress_bar(progress: ProgressBar, num_prompts: int) -> Iterator[_Bar]:
    if not progress:
        yield _Bar(None)
        return
    make = tqdm if progress is True else progress
    with make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True) as bar:
        yield _Bar(bar)


@contextlib.contextmanager
def _interrupts_after_steps() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C until the end of a step, because half a step would corrupt the scheduler.

    Yields a function that raises a delayed KeyboardInterrupt. A second Ctrl-C is not delayed.
    Outside the main thread, nothing is delayed, because Python interrupts only the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # SIGINT is ignored, or has no handler of Python
        yield lambda: None
        return
    came = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            before(signum, frame)
        came = True

    def raise_delayed() -> None:
        nonlocal came
        if came:
            came = False
            # Python's handler raises KeyboardInterrupt. A caller's handler may return.
            before(signal.SIGINT, None)

    signal.signal(signal.SIGINT, note)
    try:
        yield raise_delayed
        raise_delayed()
    finally:
        signal.signal(signal.SIGINT, before)
