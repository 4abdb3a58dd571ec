"""KV write on a CPU without compiled operations, by indexed assignment.

The indices are computed once per step.
"""

from __future__ import annotations

from torch import Tensor


class Slots:
    """Block number, and offset in the block, of each cache slot that a step writes."""

    def __init__(self, slot_mapping: Tensor, block_size: int) -> None:
        written = slot_mapping >= 0
        self.tokens: Tensor | None = None  #: bool [num_tokens]: written tokens; None for all.
        if not bool(written.all()):
            self.tokens, slot_mapping = written, slot_mapping[written]
        self.block, self.slot = slot_mapping // block_size, slot_mapping % block_size


def write_kv_cpu(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Slots
) -> None:
    """Implement `baton_kernels.kv_write.write_kv` in torch, with the step's `Slots`."""
    if slots.tokens is not None:
        key, value = key[slots.tokens], value[slots.tokens]
    key_cache[slots.block, :, slots.slot] = key.to(key_cache.dtype)
    value_cache[slots.block, :, slots.slot] = value.to(value_cache.dtype)
