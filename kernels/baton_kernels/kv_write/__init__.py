"""KV write (vLLM: reshape_and_cache): puts the keys and values of new tokens into their cache slots.

    key_cache[slot // block_size, :, slot % block_size] = key[token]      slot = slot_mapping[token]

and the same for values. A negative slot writes nothing (padding, warm-up).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import cpu as compiled  # "cpu" is the name of a file of this folder
from baton_kernels.kv_write.cpu import Slots, write_kv_cpu
from baton_kernels.kv_write.reference import to_fp8


def plan_write(slot_mapping: Tensor, block_size: int) -> Slots | None:
    """Computes once what the layers of a step have in common; None where there is nothing to prepare: in Triton and C++.

    Args:
        slot_mapping: as of `write_kv`.
    """
    return (
        None
        if slot_mapping.is_cuda or compiled.OPS is not None
        else Slots(slot_mapping, block_size)
    )


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    plan: Slots | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Writes in place, by device of `key`.

    Args:
        key: of shape [num_tokens, num_kv_heads, head_dim].
        value: like key.
        key_cache: of shape [num_blocks, num_kv_heads, block_size, head_dim]; any strides, the last one 1.
        value_cache: like key_cache, with the same strides.
        slot_mapping: int64 of shape [num_tokens]; slots >= 0 are distinct.
        plan: what `plan_write` made of this slot mapping; None: it is made now.
        key_scale: of an fp8 cache, float32 of shape [num_kv_heads]: it holds keys divided by it, saturated; None: 1.
        value_scale: the same of values; both or none.
    """
    if key.is_cuda:
        from baton_kernels.kv_write.triton_kernel import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    elif compiled.OPS is not None and key_cache.dtype in compiled.DTYPES:
        compiled.OPS.write_kv(key, value, key_cache, value_cache, slot_mapping)
    else:
        if key_cache.dtype == torch.float8_e4m3fn:
            key, value = to_fp8(key, key_scale), to_fp8(value, value_scale)
        write_kv_cpu(
            key, value, key_cache, value_cache, plan or Slots(slot_mapping, key_cache.shape[2])
        )
