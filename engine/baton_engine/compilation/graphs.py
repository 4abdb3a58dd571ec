"""Captured graphs: what a function does to memory, recorded once and repeated without Python or launch costs.

`GraphBackend` is what the rest sees of CUDA graphs, so that tests without a GPU can stand in for it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

logger = logging.getLogger(__name__)
T = TypeVar("T")


class GraphBackend(Protocol):
    def session(self) -> AbstractContextManager[None]:
        """All captures, and the runs before them, happen within one."""

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], T]]:
        """Records `run`, which ran before, on tensors that stay where they are.

        Returns:
            The result, in which nothing meaningful lies yet; graphs captured while it is held leave its memory alone. And what
            repeats the recording on what then lies in its inputs: its result lies at that place every time, and is valid until
            another graph runs that was captured after the result was let go.
        """

    def start_over(self) -> None:
        """The graphs so far are gone: later ones share memory among themselves only."""


class CudaGraphs:
    """CUDA graphs in one memory pool: only one of them runs at a time, so they may share what they need within."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Always the same, for memory of the pool is kept per stream, and so are the workspaces of matrix products. The default
        # stream cannot be recorded.
        self._stream = torch.cuda.Stream(device)
        self.start_over()

    def start_over(self) -> None:
        self._pool = (
            torch.cuda.graph_pool_handle()
        )  # a pool whose graphs are all gone takes no new ones

    @contextmanager
    def session(self) -> Iterator[None]:
        gc.collect()  # nothing of another graph may be freed while one is recorded
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what ran on this stream before it was recorded left memory that no other stream uses

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], T]]:
        graph = torch.cuda.CUDAGraph()
        # All graphs of the process share the generator's tensors, which the first one makes: those of inference mode could not be
        # changed for graphs of others outside of it.
        with torch.inference_mode(False):
            # Other threads of this process use the device as well: NCCL's watchdog, another engine.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        except BaseException:
            with suppress(
                RuntimeError
            ):  # that the recording is of no use: why, the first error says
                graph.capture_end()
            raise
        graph.capture_end()
        place = pytree.tree_map_only(Tensor, _without_ownership, result)

        def replay() -> T:
            graph.replay()
            return place

        return result, replay


class PieceGraphs:
    """The graphs of a model's pieces for one number of tokens; how a forward context runs its pieces.

    Attention runs between them and reads and writes tensors of theirs, so an argument lies where it lay at the capture.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._replays: dict[int, Callable[[], Any]] = {}
        self._addresses: dict[int, list[int]] = {}

    def __call__(self, index: int, piece: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Captures the piece the first time; its result means nothing then."""
        if index not in self._replays:
            self._addresses[index] = _addresses(args)
            result, self._replays[index] = self._backend.capture(lambda: piece(*args))
            return result  # held until later pieces have read it, so that none of them works in its memory
        if logger.isEnabledFor(logging.DEBUG):
            moved = _addresses(args) != self._addresses[index]
            assert not moved, (
                f"an argument of piece {index} is not where it was when its graph was captured"
            )
        return self._replays[index]()


def _addresses(args: tuple[Any, ...]) -> list[int]:
    return [arg.data_ptr() for arg in args if isinstance(arg, Tensor)]


def _without_ownership(tensor: Tensor) -> Tensor:
    """The same memory, not kept alive: what is captured later may use it for its own purposes.

    Through the CUDA array interface, as bytes, for it knows no bfloat16.
    """
    storage = tensor.untyped_storage()
    flat = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class _Memory:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
