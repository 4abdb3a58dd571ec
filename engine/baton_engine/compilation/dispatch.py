"""Which captured graph serves a step, if any. Pure: from numbers of tokens and sequences to a descriptor."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class GraphKind(enum.Enum):
    NONE = "none"
    PIECEWISE = "piecewise"
    """A graph for each piece between attentions; those run eagerly, so any mix of sequences will do."""
    FULL = "full"
    """One graph of the whole forward, attention included."""


class CudagraphMode(enum.Enum):
    """(kind of graph for mixed batches, kind for batches in which every sequence runs one token)."""

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
    """What a graph was captured for; steps are padded up to it."""

    num_tokens: int
    num_seqs: int | None = None
    """None: any number, for attention is not captured."""
    uniform_decode: bool = False
    """Every sequence runs one token: attention may count on it."""


class Dispatch(NamedTuple):
    kind: GraphKind
    descriptor: BatchDescriptor | None
    """None: no graph fits."""


NO_GRAPH = Dispatch(GraphKind.NONE, None)


class Dispatcher:
    """Args:
    sizes: numbers of tokens that graphs are captured for.
    max_num_seqs: sequences of a step at most.
    """

    def __init__(self, mode: CudagraphMode, sizes: Sequence[int], max_num_seqs: int) -> None:
        self.mode = mode
        self.sizes = sorted(set(sizes))
        self.max_num_seqs = max_num_seqs
        enough = bisect_left(self.sizes, max_num_seqs)
        self._decode_sizes = self.sizes[: enough + 1]

    def dispatch(self, num_tokens: int, num_seqs: int) -> Dispatch:
        """The smallest graph for a step of so many tokens and sequences; each sequence runs at least one token."""
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
        """All that `dispatch` may answer, the largest first: later ones find their memory in the pool."""
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
        """Sequences of the largest descriptor."""
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


def default_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Dense where decode steps are, so that little is padded; nothing beyond 512 tokens, where a launch costs little."""
    largest = min(max(2 * max_num_seqs, 16), 512, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), min(max_num_seqs, 512), largest}
    return sorted(size for size in sizes if size <= largest)


def _round_up(value: int, sizes: Sequence[int]) -> int | None:
    index = bisect_left(sizes, value)
    return sizes[index] if index < len(sizes) else None
