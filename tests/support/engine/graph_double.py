"""A fake of CUDA graphs for the CPU. A replay calls the captured function again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


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
