"""Values that must be equal on two engines that exchange KV blocks, as shown by `GET /health`.

The handshake of a transfer compares the same values (`baton_kv_transfer.side_channel`,
`config.compatibility_hash`). `GET /health` shows the values before the first transfer, and needs
no service key.
"""

from __future__ import annotations

import msgspec


class KVCompatibility(msgspec.Struct, frozen=True, kw_only=True):
    """Values that must be equal on engines that exchange KV blocks.

    The number of blocks and the tensor-parallel size may differ.
    """

    #: Protocol version of the KV side channel.
    version: int
    #: Hash of the files that identify the model.
    checkpoint: str
    #: Dtype of weights and KV cache.
    dtype: str
    #: Quantization of weights; `none` without quantization.
    quantization: str
    #: Name of the KV layout: the order of a block's dimensions in memory.
    layout: str
    #: Tokens per block.
    block_size: int
    num_layers: int
    #: Number of KV heads of the whole model, over all ranks.
    num_kv_heads: int
    head_dim: int
    #: Configured transport, such as `ucx`.
    transport: str


def differences(ours: KVCompatibility, theirs: KVCompatibility, here: str, there: str) -> str:
    """Return a text that lists the fields with different values; empty if all values are equal.

    An entry reads `block_size is 16 at HERE and 32 at THERE`, where HERE and THERE are the values
    of `here` and `there`.
    """
    pairs = (
        (field, getattr(ours, field), getattr(theirs, field))
        for field in KVCompatibility.__struct_fields__
    )
    return "; ".join(
        f"{field} is {mine} at {here} and {other} at {there}"
        for field, mine, other in pairs
        if mine != other
    )
