"""Captures the kernels of a function in a CUDA graph, and replays the graph with one launch.

`GraphBackend` is the interface to CUDA graphs. Tests without a GPU have their own implementation.
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
        """Return a context manager that must be active during captures and their warm-up runs."""

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], T]]:
        """Capture the kernels that `run` launches, without executing the kernels.

        `run` must have been called once before. The tensors that `run` reads must keep their
        addresses as long as `replay` is used.

        Returns:
            (result, replay). `result` is the value that `run` returned. Its tensors contain no
            computed values. As long as `result` is referenced, later captures do not use its
            memory. `replay` runs the graph on the current values of the inputs, and returns
            tensors at the addresses of `result`. Graphs that were captured after the release of
            `result` may overwrite these tensors.
        """

    def start_over(self) -> None:
        """Use a new memory pool for later graphs. The caller must first drop all earlier graphs."""


class CudaGraphs:
    """A `GraphBackend` whose graphs share one memory pool. Only one graph may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all captures: the pool's memory and the workspaces of matrix products are
        # kept per stream. The default stream cannot be captured.
        self._stream = torch.cuda.Stream(device)
        self.start_over()

    def start_over(self) -> None:
        # A pool whose graphs have all been freed accepts no new graphs.
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        gc.collect()  # another graph's memory must not be freed during a capture
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # only this stream could reuse the memory of warm-up runs

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], T]]:
        graph = torch.cuda.CUDAGraph()
        # The first graph of the process creates the tensors of torch's random generator, which all
        # graphs share. Outside inference mode, torch cannot change tensors made in inference mode.
        with torch.inference_mode(False):
            # Other threads of this process also use the device: NCCL's watchdog, another engine.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        except BaseException:
            with suppress(
                RuntimeError
            ):  # the capture is invalid, and the first error has the reason
                graph.capture_end()
            raise
        graph.capture_end()
        place = pytree.tree_map_only(Tensor, _without_ownership, result)

        def replay() -> T:
            graph.replay()
            return place

        return result, replay


class PieceGraphs:
    """The captured graphs of all pieces of a model, for one number of tokens.

    The model calls an instance as `ForwardContext.run_piece`. Attention runs between the graphs,
    and reads and writes tensors of the graphs. Each tensor argument of a piece must have the same
    address as when the piece was captured.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._replays: dict[int, Callable[[], Any]] = {}
        self._addresses: dict[int, list[int]] = {}

    def __call__(self, index: int, piece: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the piece with this index by replaying its graph, and return the result.

        The first call captures the graph. The result of that call contains no computed values.
        """
        if index not in self._replays:
            self._addresses[index] = _addresses(args)
            result, self._replays[index] = self._backend.capture(lambda: piece(*args))
            # The caller keeps the result while later pieces are captured, so that later captures do
            # not use the result's memory.
            return result
        if logger.isEnabledFor(logging.DEBUG):
            moved = _addresses(args) != self._addresses[index]
            assert not moved, (
                f"an argument of piece {index} has another address than when its graph was captured"
            )
        return self._replays[index]()


def _addresses(args: tuple[Any, ...]) -> list[int]:
    return [arg.data_ptr() for arg in args if isinstance(arg, Tensor)]


def _without_ownership(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the memory of `tensor` but does not keep the memory allocated.

    Later captures can then reuse the memory. The new tensor is made through the CUDA array
    interface. The elements are passed as bytes, because this interface has no bfloat16.
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
