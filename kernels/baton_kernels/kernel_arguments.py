"""Arguments of the Triton launches: pointers and strides, one named tuple per kind of tensor.

Triton passes the fields as separate arguments, and compiles a kernel for their alignment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Pointer = Any  #: A tensor on the host, a pointer in a kernel.


class Heads(NamedTuple):
    """A tensor [num_tokens, num_heads, head_dim] with last stride 1."""

    ptr: Pointer
    stride_token: int
    stride_head: int


class Caches(NamedTuple):
    """Both KV caches [num_blocks, num_kv_heads, block_size, head_dim], with last stride 1."""

    k_ptr: Pointer
    v_ptr: Pointer
    key_scale_ptr: Pointer | None  #: float32 [num_kv_heads]; fp8 caches only.
    value_scale_ptr: Pointer | None
    stride_block: int
    stride_head: int
    stride_slot: int
