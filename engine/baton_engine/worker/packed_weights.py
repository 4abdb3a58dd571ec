"""Packs and quantizes the weights of a loaded model for matrix products on a CPU.

The formats are in `baton_kernels.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from baton_engine.models.layers import Model
from baton_engine.models.projections import ColumnParallelLinear, Linear, RowParallelLinear
from baton_engine.models.sparse_moe import SparseMoE
from baton_kernels.linear import PackedWeight, QuantizedWeight, packing

Prepare = Callable[[Tensor], PackedWeight | QuantizedWeight]


@torch.no_grad()
def pack_weights(model: Model) -> None:
    """Reorder (pack) the weights of all matrix products of a model for CPU kernels, in place.

    Each plain weight is freed after it is packed, except the weight of a tied embedding. Experts of
    an expert-parallel model are packed later, by `ExpertStore`. If weights of the model's dtype
    cannot be packed on the model's device, the model stays as it is. No weights can be loaded into
    a packed model.
    """
    parameter = next(model.parameters())
    if packing(parameter.dtype, parameter.device) is not None:
        _replace_weights(model, PackedWeight, routers=True, prepare_head=PackedWeight)


@torch.no_grad()
def quantize_weights(model: Model, quantization: str) -> None:
    """Round the weights of matrix products of a model, except routers, to int8 or int4, in place.

    The output layer always gets int8 weights, because its rounding errors change the tokens
    directly. Embeddings, norms and routers of sparse layers keep their dtype. Routers are small,
    and their rounding errors could change which experts a token is routed to. Plain weights are
    freed as in `pack_weights`.
    """
    to_int8, to_int4 = partial(QuantizedWeight, bits=8), partial(QuantizedWeight, bits=4)
    prepare = to_int8 if quantization == "int8" else to_int4
    _replace_weights(model, prepare, routers=False, prepare_head=to_int8)


def _replace_weights(
    model: Model, prepare: Prepare, *, routers: bool, prepare_head: Prepare
) -> None:
    kept = set() if routers else set(_routers(model))
    for module in model.modules():
        if isinstance(module, (Linear, ColumnParallelLinear, RowParallelLinear)):
            if module not in kept:
                _replace(module, "weight", prepare)
        elif isinstance(module, SparseMoE) and not module.is_expert_parallel:
            module.separate_experts(prepare)
    head = model.head
    if head is None:
        return
    if head is model.embed_tokens and model.parallel.is_first_stage:
        head.packed_weight = prepare_head(head.weight)
    else:
        _replace(head, "weight", prepare_head)


def _routers(model: Model) -> Iterator[nn.Module]:
    return (module.gate for module in model.modules() if isinstance(module, SparseMoE))


def _replace(module: nn.Module, name: str, prepare: Prepare) -> None:
    weight = prepare(getattr(module, name))
    delattr(module, name)  # torch replaces a parameter only by a parameter
    setattr(module, name, weight)
