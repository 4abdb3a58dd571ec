"""Data of one step that attention reads: block tables, KV slots and sequence boundaries.

The model runner sets a `ForwardContext` around a forward, and `operators.py` reads the context.
Layers and traced graphs therefore need no argument for this data. Each thread has its own context,
because one process may run several engines.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_kernels.attention import AttentionPlan, plan_attention
from baton_kernels.kv_write import Slots, plan_write


class LayerPlan(NamedTuple):
    """The plans for one step's KV write and attention.

    All layers with the same attention window share the plans.
    """

    write: Slots | None  #: None if the KV write needs no plan on this device.
    attention: AttentionPlan


#: Runs one piece of a compiled model: (index of the piece, the piece, arguments) -> result.
#: Arguments are tensors and sizes.
RunPiece = Callable[[int, Callable[..., Any], tuple[Any, ...]], Any]


@dataclass(slots=True)
class ForwardContext:
    """Data that attention reads in a step with `num_tokens` tokens of `num_seqs` sequences.

    All tensors are on the model's device.
    """

    #: int64 [num_tokens]: place of the token's KV, as block id * block_size + offset in the block.
    #: -1: the KV is not written.
    slot_mapping: Tensor
    block_tables: Tensor  # int32 [num_seqs, max_blocks_per_seq]
    cu_seqlens_q: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs], including this step's tokens
    #: This rank's cache: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim].
    kv_cache: Tensor
    max_seqlen_q: int | None = None  # most tokens of one sequence in this step; None: unknown
    #: If not None, each sparse layer appends the chosen experts: int [num_tokens, top_k].
    routed_experts: list[Tensor] | None = None
    #: With expert parallelism: each rank's number of tokens in this step. Empty: this rank runs the
    #: step alone.
    wave_tokens: tuple[int, ...] = ()
    #: Set when the expert group breaks. The results of this step are then invalid.
    broken: GroupBrokenError | None = None
    tensor_group: Group | None = None  # group for the all-reduces of a compiled graph
    #: Callback after the last layer's KV write. A captured graph does not call this function.
    kv_written: Callable[[], None] | None = None
    #: int64 [num_tokens]: 1 for tokens of the second text of a pair, else 0. None: all are 0. Only
    #: encoders read it.
    token_types: Tensor | None = None
    #: Runs a piece of a compiled model, for example as a captured graph. None: pieces are called
    #: directly.
    run_piece: RunPiece | None = None
    _plans: dict[int | None, LayerPlan] = field(default_factory=dict, init=False, repr=False)
    _layers: tuple[Tensor, ...] | None = field(default=None, init=False, repr=False)
    _bounds: list[tuple[int, int]] | None = field(default=None, init=False, repr=False)

    @property
    def reports_by_layer(self) -> bool:
        """Whether `routed_experts` or `kv_written` is set, so that layers must run one by one."""
        return self.routed_experts is not None or self.kv_written is not None

    @property
    def query_bounds(self) -> list[tuple[int, int]]:
        """For each sequence, the range [start, end) of its tokens among this step's tokens."""
        if self._bounds is None:
            bounds = self.cu_seqlens_q.tolist()
            self._bounds = list(itertools.pairwise(bounds))
        return self._bounds

    def layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values of layer number `layer` on this rank.

        Returns:
            Two tensors of shape [num_blocks, num_kv_heads, block_size, head_dim].
        """
        if self._layers is None:
            self._layers = self.kv_cache.unbind(2)
        keys, values = self._layers[layer].unbind(2)
        return keys, values

    def plan(self, query: Tensor, window: int | None) -> LayerPlan:
        """Return the step's plan for layers with this window. The first call makes the plan.

        Args:
            query: queries of the calling layer, of shape [num_tokens, num_heads, head_dim].
            window: size of the sliding window in tokens, at least 1. None: no window.
        """
        plan = self._plans.get(window)
        if plan is None:
            cache = self.kv_cache[:, :, 0, 0]
            plan = self._plans[window] = LayerPlan(
                plan_write(cache, self.slot_mapping),
                plan_attention(
                    query,
                    cache,
                    self.block_tables,
                    self.cu_seqlens_q,
                    self.seq_lens,
                    window,
                    self.max_seqlen_q,
                ),
            )
        return plan


@dataclass(slots=True)
class ForwardBatch:
    """Input of the model for one step. All tensors are on the model's device."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    context: ForwardContext


_thread = threading.local()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Set this thread's context within a `with` block, then restore the previous context."""
    before = getattr(_thread, "context", None)
    _thread.context = context
    try:
        yield context
    finally:
        _thread.context = before


def current_context() -> ForwardContext:
    """Return the context of this thread.

    Raises:
        RuntimeError: called outside of `forward_context`.
    """
    context: ForwardContext | None = getattr(_thread, "context", None)
    if context is None:
        raise RuntimeError(
            "a model runs only within forward_context(), which has the KV addresses for attention"
        )
    return context
