"""Compiles every Triton kernel for a Hopper GPU, down to machine code; needs no GPU. Run by test_compile.py, in a process of
its own: a process that interprets kernels cannot compile them."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_kernels.attention.triton_kernel import _paged_attention_kernel
from baton_kernels.block_copy.triton_kernel import _copy_blocks_kernel
from baton_kernels.kv_write.triton_kernel import _write_kv_kernel

HOPPER = GPUTarget("cuda", 90, 32)
INTEGER_POINTERS = {
    "block_tables_ptr": "*i32",
    "cu_seqlens_q_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "slot_mapping_ptr": "*i64",
    "pairs_ptr": "*i64",
}


def compile_kernel(kernel: Any, dtype: str, constants: dict[str, int]) -> None:
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGER_POINTERS:
            signature[name] = INTEGER_POINTERS[name]
        elif name.endswith("_ptr"):
            signature[name] = f"*{dtype}"
        else:
            signature[name] = "fp32" if name == "scale_log2e" else "i32"
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=HOPPER)
    assert compiled.asm["cubin"]
    print(f"{kernel.__name__} {dtype}: {compiled.metadata.shared} bytes of shared memory")


for dtype, window in (("fp32", 4096), ("bf16", 0)):
    heads = {"HEAD_DIM": 128, "HEAD_DIM_PADDED": 128, "BLOCK_SIZE": 16}
    attention = heads | {"GROUP": 8, "BLOCK_M": 64, "BLOCK_Q": 8, "KV_TILE": 64, "WINDOW": window}
    compile_kernel(_paged_attention_kernel, dtype, attention)
    compile_kernel(_write_kv_kernel, dtype, heads)
    compile_kernel(_copy_blocks_kernel, dtype, {"TILE": 4096})
