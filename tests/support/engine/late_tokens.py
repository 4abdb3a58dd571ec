"""A stand-in on a CPU for a GPU whose sampled tokens reach the host late."""

from __future__ import annotations

import threading
from typing import ClassVar

import numpy as np
from torch import Tensor

from baton_engine.executor.step import SchedulerOutput
from baton_engine.worker import model_runner
from baton_engine.worker.model_runner import ModelRunner
from baton_engine.worker.sampled_tokens import Int64Array, SampledTokens
from baton_engine.worker.worker import Worker

#: The value on the host until the token is copied. It is not a token id.
NOT_COPIED = -1
WAIT_S = 60.0


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
        defer_tokens(self._loaded)

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
