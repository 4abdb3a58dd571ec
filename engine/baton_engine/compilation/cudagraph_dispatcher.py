"""Chooses the captured graph for a step by the numbers of tokens and sequences in the step."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class GraphKind(enum.Enum):
    """The part of the model's forward pass that a CUDA graph contains."""

    NONE = "none"
    #: One graph per piece between attentions. Attention runs eagerly, so any mix of sequences fits.
    PIECEWISE = "piecewise"
    #: One graph of the whole forward, attention included.
    FULL = "full"


class CudagraphMode(enum.Enum):
    """The kind of CUDA graph for mixed batches, and the kind for decode batches.

    In a decode batch every sequence runs one token. All other batches are mixed.
    """

    NONE = (GraphKind.NONE, GraphKind.NONE)
    PIECEWISE = (GraphKind.PIECEWISE, GraphKind.PIECEWISE)
    FULL = (GraphKind.FULL, GraphKind.FULL)
    FULL_DECODE_ONLY = (GraphKind.NONE, GraphKind.FULL)
    FULL_AND_PIECEWISE = (GraphKind.PIECEWISE, GraphKind.FULL)

    @property
    def mixed(self) -> GraphKind:
        return self.value[0]

    @property
    def decode(self) -> GraphKind:
        return self.value[1]

    @property
    def has_pieces(self) -> bool:
        return GraphKind.PIECEWISE in self.value


class BatchDescriptor(NamedTuple):
    """The batch size that a graph was captured for. Steps are padded to this size."""

    num_tokens: int
    num_seqs: int | None = None  # None: any number, because attention is not captured
    uniform_decode: bool = False  # every sequence runs one token, which attention may rely on


class Dispatch(NamedTuple):
    kind: GraphKind
    descriptor: BatchDescriptor | None  # None: no graph fits


NO_GRAPH = Dispatch(GraphKind.NONE, None)


class CudagraphDispatcher:
    """Chooses the captured graph for each step.

    Args:
        mode: kinds of graphs to use.
        sizes: numbers of tokens that graphs are captured for.
        max_num_seqs: maximum number of sequences in a step.
    """

    def __init__(self, mode: CudagraphMode, sizes: Sequence[int], max_num_seqs: int) -> None:
        self.mode = mode
        self.sizes = sorted(set(sizes))
        self.max_num_seqs = max_num_seqs
        enough = bisect_left(self.sizes, max_num_seqs)
        self._decode_sizes = self.sizes[: enough + 1]

    def dispatch(self, num_tokens: int, num_seqs: int) -> Dispatch:
        """Return the smallest graph that fits a step, or NO_GRAPH if none fits.

        Each sequence of the step must run at least one token.
        """
        if num_tokens == num_seqs and self.mode.decode is GraphKind.FULL:
            size = _round_up(num_tokens, self._decode_sizes)
            return (
                NO_GRAPH
                if size is None
                else Dispatch(GraphKind.FULL, BatchDescriptor(size, size, True))
            )
        size = _round_up(num_tokens, self.sizes)
        return NO_GRAPH if size is None else self._mixed(size)

    def graphs(self) -> list[Dispatch]:
        """Return all graphs that `dispatch` may choose, the largest first.

        If graphs are captured in this order, smaller graphs reuse the memory of larger graphs.
        """
        wanted = (
            [] if self.mode.mixed is GraphKind.NONE else [self._mixed(size) for size in self.sizes]
        )
        if self.mode.decode is GraphKind.FULL:
            wanted += [self.dispatch(size, size) for size in self._decode_sizes]
        return sorted(
            wanted,
            key=lambda each: each.descriptor.num_tokens if each.descriptor else 0,
            reverse=True,
        )

    @property
    def max_padded_seqs(self) -> int:
        """Largest number of sequences to which a step is padded. 0: sequences are never padded."""
        return max(
            (each.descriptor.num_seqs or 0 for each in self.graphs() if each.descriptor), default=0
        )

    def _mixed(self, size: int) -> Dispatch:
        match self.mode.mixed:
            case GraphKind.NONE:
                return NO_GRAPH
            case GraphKind.PIECEWISE:
                return Dispatch(GraphKind.PIECEWISE, BatchDescriptor(size))
            case GraphKind.FULL:
                return Dispatch(GraphKind.FULL, BatchDescriptor(size, min(size, self.max_num_seqs)))


def _round_up(value: int, sizes: Sequence[int]) -> int | None:
    index = bisect_left(sizes, value)
    return sizes[index] if index < len(sizes) else None
