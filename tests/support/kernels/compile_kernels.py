"""Script that compiles every Triton kernel to machine code for a Hopper GPU. It needs no GPU.

For test_compile.py, which starts it as a process. A process that interprets kernels cannot compile.
"""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_kernels.activation.triton_kernel import _silu_and_mul_kernel
from baton_kernels.attention.split_kv_triton import join_segments_kernel
from baton_kernels.attention.triton_kernel import _paged_attention_kernel
from baton_kernels.attention.triton_plan import default_configuration
from baton_kernels.block_checksum.triton_kernel import _block_sums_kernel
from baton_kernels.block_copy.triton_kernel import _copy_blocks_kernel
from baton_kernels.kv_write.triton_kernel import _write_kv_kernel
from baton_kernels.moe.gemm_triton import _combine_kernel, _down_kernel, _gate_up_kernel
from baton_kernels.moe.gemv_triton import _down_row_kernel, _gate_up_row_kernel
from baton_kernels.moe.routing_triton import _count_kernel, _place_kernel, _route_kernel
from baton_kernels.norm.triton_kernel import _rms_norm_kernel
from baton_kernels.rope.triton_kernel import _rotate_qk_kernel
from baton_kernels.sampling import triton_greedy
from baton_kernels.sampling import triton_kernel as sampling

HOPPER = GPUTarget("cuda", 90, 32)
#: Limit of a program's shared memory, in bytes.
MAX_SHARED = 227 * 1024
FLOAT_POINTERS = dict.fromkeys(("cos_ptr", "sin_ptr", "key_scale_ptr", "value_scale_ptr"), "*fp32")
INTEGER_POINTERS = {
    "block_tables_ptr": "*i32",
    "cu_seqlens_q_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "slot_mapping_ptr": "*i64",
    "pairs_ptr": "*i64",
    "block_ids_ptr": "*i64",
    "chains_ptr": "*i64",
    "expert_ids_ptr": "*i64",
    "counts_ptr": "*i32",
    "sorted_pairs_ptr": "*i32",
    "tile_experts_ptr": "*i32",
    "num_padded_ptr": "*i32",
    "segments_ptr": "*i32",
}


#: Numbers that change from step to step.
VARYING = {"num_rows", "num_tokens", "num_pairs", "num_seqs", "target_segments", "stride_table_seq"}
#: Pointers into a tensor, with any alignment.
MOVING = {
    "block_tables_ptr",
    "cu_seqlens_q_ptr",
    "seq_lens_ptr",
    "pairs_ptr",
    "block_ids_ptr",
}


def source_of(
    kernel: Any, dtype: str, constants: dict[str, Any], types: dict[str, str]
) -> ASTSource:
    """Return the source of `kernel` with the specialization that serving uses.

    Pointers and strides are multiples of 16. Fail if the kernel specializes on arguments that vary,
    because serving would then compile it again.

    Args:
        kernel: the kernel.
        dtype: element type of pointers that no other argument determines.
        constants: values by name of the parameter, or of the field of a named tuple.
        types: types that names do not determine.
    """
    known = INTEGER_POINTERS | FLOAT_POINTERS | types
    hints = get_type_hints(kernel.fn)
    values: dict[tuple[int, ...], object] = {}
    attrs: dict[tuple[int, ...], list[list[object]]] = {}

    def type_of(name: str, path: tuple[int, ...], parameter: Any = None) -> str:
        """Return the Triton type of an argument or, without `parameter`, of a field of a tuple."""
        if name in constants:
            values[path] = constants[name]
            return "constexpr"
        is_fixed = parameter is None or not parameter.do_not_specialize
        assert not (is_fixed and name in VARYING), (
            f"{kernel.__name__} is recompiled for each {name}"
        )
        is_specialized = is_fixed and (
            parameter is None or not parameter.do_not_specialize_on_alignment
        )
        assert not (is_specialized and name in MOVING), (
            f"{kernel.__name__} is recompiled for other alignments of {name}"
        )
        number = "fp32" if name in ("scale", "soft_cap", "eps") else "i32"
        kind = known.get(name, f"*{dtype}" if name.endswith("ptr") else number)
        if is_specialized and kind != "fp32":
            attrs[path] = [["tt.divisibility", 16]]
        return kind

    signature: dict[str, object] = {}
    for index, parameter in enumerate(kernel.params):
        name, hint = parameter.name, hints.get(parameter.name)
        # Triton's launcher has local variables of these names.
        assert name not in ("params", "specialization", "options"), kernel.__name__
        groups = [one for one in (hint, *get_args(hint)) if hasattr(one, "_fields")]
        if groups and name not in constants:
            fields = enumerate(groups[0]._fields)
            signature[name] = groups[0](
                *(type_of(field, (index, place)) for place, field in fields)
            )
        else:
            signature[name] = type_of(name, (index,), parameter)
    return ASTSource(kernel, signature, constexprs=values, attrs=attrs)


def compile_kernel(
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    types: dict[str, str] | None = None,
    options: dict[str, int] | None = None,
) -> Any:
    """Compile a kernel, and check that its shared memory fits. Arguments: see `source_of`."""
    source = source_of(kernel, dtype, constants, types or {})
    compiled = triton.compile(source, target=HOPPER, options=options)
    assert compiled.asm["cubin"]
    print(f"{kernel.__name__} {dtype}: {compiled.metadata.shared} bytes of shared memory")
    assert compiled.metadata.shared <= MAX_SHARED, kernel.__name__
    return compiled


NO_SCALES = {"key_scale_ptr": None, "value_scale_ptr": None}
for dtype in ("fp32", "bf16"):
    heads = {"HEAD_DIM": 128, "HEAD_DIM_PADDED": 128, "BLOCK_SIZE": 16}
    compile_kernel(_write_kv_kernel, dtype, heads | {"HEADS": 8} | NO_SCALES)
    for one_tile in (0, 1):
        compile_kernel(
            _rms_norm_kernel, dtype, {"ROWS": 1, "TILE": 4096, "ADD": 1, "ONE_TILE": one_tile}
        )
    halves = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "HALF_PADDED": 64, "HEADS": 4}
    compile_kernel(_rotate_qk_kernel, dtype, halves)
    compile_kernel(_silu_and_mul_kernel, dtype, {"TILE": 1024})
compile_kernel(_copy_blocks_kernel, "i64", {"TILE": 1024})
compile_kernel(_block_sums_kernel, "i64", {"PERIOD": 8192, "TILE": 1024, "TILES": 4})
fp8_cache = dict.fromkeys(("k_ptr", "v_ptr"), "*fp8e4nv")
compile_kernel(_write_kv_kernel, "bf16", heads | {"HEADS": 8}, fp8_cache)


partials = dict.fromkeys(("out_ptr", "sum_ptr", "max_ptr"), "*fp32")


def compile_attention(
    dtype: str, kv_dtype: str, head_dim: int, decode: bool, **options: int | None
) -> None:
    """Compile attention with the default configuration and 4 query heads per KV head.

    Check that loads are asynchronous and 16 bytes wide, and that long query blocks use wgmma.
    """
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}[
        kv_dtype
    ]
    config = default_configuration(decode, head_dim, torch_dtype)
    constants = {
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": 16,
        "GROUP": 4,
        "BLOCK_M": config["BLOCK_M"],
        "BLOCK_Q": config["BLOCK_M"] // 4,
        "KV_TILE": config["KV_TILE"],
        "MIN_TILES": 4,
        "SCAN": 128,
        "ONE_BLOCK": decode,
        **options,
    }
    types = partials | dict.fromkeys(("k_ptr", "v_ptr"), f"*{kv_dtype}")
    launch = {"num_warps": config["num_warps"], "num_stages": config["num_stages"]}
    compiled = compile_kernel(_paged_attention_kernel, dtype, constants, types, launch)
    phase = "decode" if decode else "prefill"
    name = f"{phase} {dtype}, KV {kv_dtype}, head_dim {head_dim}, {options}"
    assert re.search(
        r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", compiled.asm["ptx"]
    ), name
    assert ("wgmma" in compiled.asm["ptx"]) == (not decode and dtype == "bf16"), name


NO_WINDOW = {"WINDOW": 0}
NO_SPLIT = {"partials": None}
NO_CAP = {"soft_cap": None}
PLAIN = NO_WINDOW | NO_SCALES | NO_CAP
for head_dim in (64, 128, 256):
    compile_attention("bf16", "bf16", head_dim, True, **PLAIN)
    compile_attention("bf16", "bf16", head_dim, False, **PLAIN, **NO_SPLIT)
compile_attention("bf16", "fp8e4nv", 128, True, **NO_WINDOW, **NO_CAP)
compile_attention("bf16", "fp8e4nv", 80, False, WINDOW=4096, **NO_SPLIT)
compile_attention("fp32", "fp32", 128, False, WINDOW=4096, **NO_SCALES, **NO_CAP, **NO_SPLIT)
joined = {
    "NUM_KV_HEADS": 8,
    "HEAD_DIM": 128,
    "HEAD_DIM_PADDED": 128,
    "GROUP": 4,
    "BLOCK_M": 16,
    "SEGMENT_TILE": 32,
}
compile_kernel(join_segments_kernel, "bf16", joined, partials)

MODEL = {"HIDDEN": 2048, "INTERMEDIATE": 768}
EXPERTS = {"NUM_EXPERTS": 128, "TOP_K": 8}
for dtype, tile in (
    ("fp32", {"BLOCK_M": 16, "BLOCK_K": 32, "SWAP": 1}),
    ("bf16", {"BLOCK_M": 16, "BLOCK_K": 128, "SWAP": 1}),
    ("bf16", {"BLOCK_M": 64, "BLOCK_K": 64, "SWAP": 0}),
):
    gemm = MODEL | tile | {"BLOCK_N": 64, "GROUP_M": 8}
    compile_kernel(_gate_up_kernel, dtype, gemm | {"TOP_K": 8})
    compile_kernel(_down_kernel, dtype, gemm)
for dtype in ("fp32", "bf16"):
    gemv = MODEL | EXPERTS | {"BLOCK_N": 4, "BLOCK_K": 256}
    compile_kernel(_gate_up_row_kernel, dtype, gemv)
    compile_kernel(_down_row_kernel, dtype, gemv | {"UNROLL": 2})
    compile_kernel(_combine_kernel, dtype, EXPERTS | {"HIDDEN": 2048, "BLOCK_H": 1024})
    routing = {"NUM_EXPERTS": 128, "EXPERTS_PADDED": 128}
    compile_kernel(
        _route_kernel, dtype, routing | {"TOP_K": 8, "TOP_K_PADDED": 8, "RENORMALIZE": 1, "ROWS": 1}
    )
compile_kernel(_count_kernel, "i32", {"CHUNK": 1024})
compile_kernel(_place_kernel, "i32", routing | {"BLOCK_M": 16, "CHUNK": 1024})

sampling_types = dict.fromkeys(("out_ptr", "state_ptr", "params_ptr", "best_ptr"), "*i64")
one_pass, search = {"TILE": 1024}, {"TILE": 1024, "PIVOTS": sampling.PIVOTS}
blocks, gathered = {"BLOCK_TOKENS": sampling.BLOCK}, {"CAPACITY": sampling.CAPACITY}
compile_kernel(sampling._block_maxima_kernel, "fp32", one_pass | blocks, sampling_types)
compile_kernel(sampling._bounds_kernel, "fp32", search | blocks, sampling_types)
compile_kernel(sampling._collect_kernel, "fp32", one_pass | gathered, sampling_types)
compile_kernel(sampling._draw_kernel, "fp32", search | gathered, sampling_types)
compile_kernel(triton_greedy._greedy_kernel, "fp32", one_pass, sampling_types)
