"""The values that two engines must share to exchange KV blocks: part of `GET /health`.

The handshake of a transfer compares the same values (`baton_kv_transfer.side_channel`,
`config.compatibility_hash`). `GET /health` shows them before the first transfer, and without the
service key.
"""

from __future__ import annotations

import msgspec


class KVCompatibility(msgspec.Struct, frozen=True, kw_only=True):
    """Values that are equal on engines that can exchange blocks.

    Numbers of blocks and of tensor-parallel ranks may differ.
    """

    #: Version of the side channel.
    version: int
    #: Hash of the files that identify the model.
    checkpoint: str
    #: Dtype of weights and KV cache.
    dtype: str
    #: Quantization of weights; `none` if they are exact.
    quantization: str
    layout: str
    block_size: int
    num_layers: int
    #: The model's, over all ranks.
    num_kv_heads: int
    head_dim: int
    #: Configured transport, such as `ucx`.
    transport: str


def differences(ours: KVCompatibility, theirs: KVCompatibility, here: str, there: str) -> str:
    """Return texts such as `block_size is 16 at HERE and 32 at THERE`; empty if all are equal."""
    pairs = (
        (field, getattr(ours, field), getattr(theirs, field))
        for field in KVCompatibility.__struct_fields__
    )
    return "; ".join(
        f"{field} is {mine} at {here} and {other} at {there}"
        for field, mine, other in pairs
        if mine != other
    )
