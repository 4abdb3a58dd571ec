"""Named tuples of pointers and strides, which Triton kernels take as arguments.

Triton passes each field as a separate argument, and compiles a kernel for the fields' alignment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Pointer = Any  #: A tensor on the host, a pointer in a kernel.


class Heads(NamedTuple):
    """Pointer and strides of a tensor [num_tokens, num_heads, head_dim] with last stride 1."""

    ptr: Pointer
    stride_token: int
    stride_head: int


class Caches(NamedTuple):
    """Pointers and strides of the key cache and the value cache.

    Both have the shape [num_blocks, num_kv_heads, block_size, head_dim], and last stride 1.
    """

    k_ptr: Pointer
    v_ptr: Pointer
    key_scale_ptr: Pointer | None  #: float32 [num_kv_heads]; fp8 caches only.
    value_scale_ptr: Pointer | None
    stride_block: int
    stride_head: int
    stride_slot: int
