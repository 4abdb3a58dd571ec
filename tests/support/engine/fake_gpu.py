"""Fakes of a GPU on the CPU: tensors, CUDA graphs, and sampled tokens that reach the host late.

For the tests of graphs, workers and pending tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from baton_engine.executor.step import SchedulerOutput
from baton_engine.worker import model_runner
from baton_engine.worker.model_runner import ModelRunner
from baton_engine.worker.sampling.sampled_tokens import Int64Array, SampledTokens
from baton_engine.worker.worker import Worker

T = TypeVar("T")
#: The value on the host until the token is copied. It is not a token id.
NOT_COPIED = -1
WAIT_S = 60.0


class GPUTensor(torch.Tensor):
    """A tensor in host memory that claims to be on a GPU."""

    is_cuda = True


class RecordedRuns:
    """Captures and replays functions with the memory rules of CUDA graphs.

    A replay reads the input tensors of the capture and writes the result tensors of the capture.
    Before the first replay, the result tensors are NaN.
    """

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self._in_session = False

    @contextmanager
    def session(self) -> Iterator[None]:
        self._in_session = True
        yield
        self._in_session = False

    def start_over(self) -> None:
        pass

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], T]]:
        assert self._in_session
        self.num_captures += 1
        result = pytree.tree_map_only(Tensor, torch.clone, run())

        def replay() -> T:
            self.num_replays += 1
            for place, tensor in zip(
                pytree.tree_leaves(result), pytree.tree_leaves(run()), strict=True
            ):
                if isinstance(place, Tensor):
                    place.copy_(tensor)
            return result

        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.fill_(torch.nan)
        return result, replay


class LateTokens(SampledTokens):
    """Tokens that reach the host when a thread waits for them, unless a test holds them."""

    #: Whether new tokens are held until `release`.
    are_held = False
    _held: ClassVar[list[LateTokens]] = []

    def __init__(self, token_ids: Tensor, is_impossible: Tensor | None) -> None:
        super().__init__(token_ids, is_impossible)
        self._on_host = np.full(len(token_ids), NOT_COPIED)
        self._released = threading.Event()
        self._held.append(self)
        if not self.are_held:
            self.release()

    def wait(self) -> Int64Array:
        assert self._released.wait(WAIT_S), "the tokens are still held"
        self._on_host[:] = self.token_ids.numpy()
        return self._on_host

    @classmethod
    def release(cls) -> None:
        """Let all tokens so far reach the host."""
        while cls._held:
            cls._held.pop()._released.set()


def defer_tokens(runner: ModelRunner) -> None:
    """Make the runner defer sampled tokens, as on a GPU with asynchronous scheduling.

    In this process, all runners then sample LateTokens.
    """
    runner._defers_tokens = True
    model_runner.SampledTokens = LateTokens  # type: ignore[misc]


class DeferringWorker(Worker):
    """A worker that defers sampled tokens. Executors call its methods by name."""

    num_forwards = 0

    def load_model(self) -> None:
        super().load_model()
        defer_tokens(self._model_runner)

    def execute_model(self, step: SchedulerOutput) -> None:
        super().execute_model(step)
        self.num_forwards += 1

    def get_num_forwards(self) -> int:
        return self.num_forwards

    def hold_tokens(self) -> None:
        LateTokens.are_held = True

    def release_tokens(self) -> None:
        LateTokens.release()

    def shutdown(self) -> None:
        LateTokens.are_held = False
        LateTokens.release()
        super().shutdown()
