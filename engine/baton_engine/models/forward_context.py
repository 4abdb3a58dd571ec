"""What attention needs of a step and no other layer does: where KV goes and lies, and which queries belong together.

It would have to pass through every layer and every traced graph, so it lies beside them: set around a forward, read by `attend`.
Each thread has its own, for several engines may run in one process. What reads it is in `operators`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from baton_engine.distributed.group import Group
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_kernels.attention import plan_attention
from baton_kernels.attention.cpu import AttentionPlan
from baton_kernels.kv_write import plan_write
from baton_kernels.kv_write.cpu import Slots


class LayerPlan(NamedTuple):
    """See baton_kernels; None where the device has no use for it."""

    write: Slots | None
    attention: AttentionPlan | None


RunPiece = Callable[[int, Callable[..., Any], tuple[Any, ...]], Any]
"""(number of the piece, what it is, its arguments) -> its result: tensors, and sizes among the arguments."""


@dataclass(slots=True)
class ForwardContext:
    """Of one step: `num_tokens` tokens of `num_seqs` sequences. All tensors are on the model's device."""

    slot_mapping: Tensor
    """int64 [num_tokens]: block id * block_size + offset where the token's KV goes; -1: nowhere."""
    block_tables: Tensor
    """int32 [num_seqs, max_blocks_per_seq]."""
    cu_seqlens_q: Tensor
    """int32 [num_seqs + 1]."""
    seq_lens: Tensor
    """int32 [num_seqs], this step's tokens included."""
    kv_cache: Tensor
    """[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]: this rank's heads and layers."""
    max_seqlen_q: int | None = None
    """Tokens of the sequence that has most in this step; None: unknown."""
    routed_experts: list[Tensor] | None = None
    """Not None: every sparse layer appends the experts of each token, int [num_tokens, experts per token]."""
    wave_tokens: tuple[int, ...] = ()
    """Where experts are spread over ranks: tokens that each of them runs in this step. Empty: a step for oneself."""
    broken: GroupBrokenError | None = None
    """Set when the group of those ranks breaks: what this step computes is good for nothing from then on."""
    tensor_group: Group | None = None
    """Whom a compiled graph sums with; set by who runs it."""
    run_piece: RunPiece | None = None
    """Not None: runs the pieces of a compiled model, perhaps as graphs; None: they are called."""
    _plans: dict[int | None, LayerPlan] = field(default_factory=dict, init=False, repr=False)
    _layers: tuple[Tensor, ...] | None = field(default=None, init=False, repr=False)

    def layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's layer `layer`, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        if self._layers is None:
            self._layers = self.kv_cache.unbind(2)
        keys, values = self._layers[layer].unbind(2)
        return keys, values

    def plan(self, window: int | None) -> LayerPlan:
        """What attention layers with this window have in common in this step; made when the first of them asks."""
        plan = self._plans.get(window)
        if plan is None:
            cache = self.kv_cache[:, :, 0, 0]
            plan = self._plans[window] = LayerPlan(
                plan_write(self.slot_mapping, cache.shape[2]),
                plan_attention(cache, self.block_tables, self.cu_seqlens_q, self.seq_lens, window),
            )
        return plan


@dataclass(slots=True)
class ForwardBatch:
    """One step's input to the model, on its device."""

    input_ids: Tensor
    """int64 [num_tokens]."""
    positions: Tensor
    """int64 [num_tokens]."""
    context: ForwardContext


_thread = threading.local()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Every forward of this thread within is of the step `context`."""
    before = getattr(_thread, "context", None)
    _thread.context = context
    try:
        yield context
    finally:
        _thread.context = before


def current_context() -> ForwardContext:
    """Raises RuntimeError outside of `forward_context`."""
    context: ForwardContext | None = getattr(_thread, "context", None)
    if context is None:
        raise RuntimeError(
            "a model runs only within forward_context(): attention would not know where the KV lies"
        )
    return context
