"""C++ operations for CPUs (`source/`), loaded as torch.ops.baton_cpu.*.

`make install` compiles the operations with `python -m baton_kernels.cpu.build`. OPS is None if they
were not compiled, or if the processor lacks the instructions. Then the torch versions of the
operations run. The environment variable BATON_CPU_KERNELS=torch always selects the torch versions.
BATON_CPU_KERNELS=avx2 selects the operations for processors without AVX-512.

    instruction_sets  one compiled file per instruction set, and which one this processor loads
    build             compiles the operations
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton_kernels.cpu.instruction_sets import choose, library_file, processor_flags

#: The dtypes of the operations. Dispatchers use the torch versions for other dtypes.
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

Op = Callable[..., Any]  #: A torch operator or C function. Both are untyped.


@dataclass(frozen=True, slots=True)
class Ops:
    """The compiled operations. Their schemas are at the end of source/ops.cpp."""

    rms_norm: Op
    add_rms_norm: Op
    rotate_qk: Op
    silu_and_mul: Op
    write_kv: Op
    paged_attention: Op
    pack_weight: Op
    linear: Op
    pack_quantized: Op
    quantized_linear: Op
    route: Op
    run_experts: Op
    draw_tokens: Op
    sum_runs: Op
    keep_freed_results: Op
    return_freed_results: Op


#: The argument types of the functions that are not torch operators.
_C_FUNCTIONS = {
    "sum_runs": [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3],
    "keep_freed_results": [ctypes.c_int64],
    "return_freed_results": [],
}


def _load() -> tuple[Ops | None, str]:
    chosen, why = choose(processor_flags(), os.environ.get("BATON_CPU_KERNELS", ""))
    if chosen is None:
        return None, f"torch ({why})"
    try:
        torch.ops.load_library(library_file(chosen))
        library = ctypes.CDLL(str(library_file(chosen)))
    except OSError as error:
        return None, f"torch ({library_file(chosen)}: {error})"
    _register_fakes()
    functions = {name: getattr(library, f"baton_{name}") for name in _C_FUNCTIONS}
    for name, argument_types in _C_FUNCTIONS.items():
        functions[name].restype, functions[name].argtypes = None, argument_types
    operators = {
        name: getattr(torch.ops.baton_cpu, name).default
        for name in Ops.__slots__
        if name not in functions
    }
    return Ops(**operators, **functions), f"C++ ({why})"


def _register_fakes() -> None:
    """Register fake versions of the operations, which give torch.compile the results' shapes."""

    def fake(name: str) -> Callable[[Op], Op]:
        return torch.library.register_fake(f"baton_cpu::{name}")

    @fake("rms_norm")
    def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    @fake("add_rms_norm")
    def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(x.shape)

    @fake("rotate_qk")
    def _(qkv: Tensor, num_heads: int, num_kv_heads: int, *others: object) -> tuple[Tensor, Tensor]:
        num_tokens, width = qkv.shape
        head_dim = width // (num_heads + 2 * num_kv_heads)
        q, k = ((num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads))
        return qkv.new_empty(q), qkv.new_empty(k)

    @fake("silu_and_mul")
    def _(gate_up: Tensor) -> Tensor:
        return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))

    for name in ("write_kv", "paged_attention"):  # they return nothing
        fake(name)(lambda *arguments: None)

    @fake("linear")
    def _(x: Tensor, panels: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
        return x.new_empty((*x.shape[:-1], out_features))

    @fake("quantized_linear")
    def _(
        x: Tensor, panels: Tensor, scales: Tensor, out_features: int, bias: Tensor | None
    ) -> Tensor:
        return x.new_empty((*x.shape[:-1], out_features))

    @fake("draw_tokens")
    def _(logits: Tensor, *parameters: object) -> Tensor:
        return logits.new_empty(logits.shape[:1], dtype=torch.int64)


#: OPS: the compiled operations; None if the torch versions run. DESCRIPTION: which versions run,
#: and why, for the log.
OPS, DESCRIPTION = _load()


def ops_for(x: Tensor) -> Ops | None:
    """Return the compiled operations if they support the device and dtype of x, else None.

    The result is None under torch.compile, which fuses the torch versions with other operations.
    """
    return OPS if x.is_cpu and x.dtype in DTYPES and not torch.compiler.is_compiling() else None
