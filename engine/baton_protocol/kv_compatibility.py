"""What two engines must have in common to exchange KV blocks: part of the body of `GET /health` of an engine with a KV role.

The handshake of a transfer compares the same (`baton_kv_transfer.side_channel`, `config.compatibility_hash`); here it can be read
before any request has tried, and by who has no key.
"""

from __future__ import annotations

import msgspec


class KVCompatibility(msgspec.Struct, frozen=True, kw_only=True):
    """Equal on engines that can exchange blocks. Numbers of blocks and of tensor-parallel ranks may differ."""

    version: int
    """Of the side channel."""
    checkpoint: str
    """A hash over what identifies it."""
    dtype: str
    """Of weights and KV cache."""
    quantization: str
    """Of weights; `none` if they are exact."""
    layout: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    """Of the model."""
    head_dim: int


def differences(ours: KVCompatibility, theirs: KVCompatibility, here: str, there: str) -> str:
    """`block_size is 16 at HERE and 32 at THERE; ...`; empty if blocks can be exchanged."""
    pairs = (
        (field, getattr(ours, field), getattr(theirs, field))
        for field in KVCompatibility.__struct_fields__
    )
    return "; ".join(
        f"{field} is {mine} at {here} and {other} at {there}"
        for field, mine, other in pairs
        if mine != other
    )
