"""Packs a model's weights for products on a CPU (see baton_kernels.linear), after they were loaded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from baton_engine.models.layers import CausalLM, ColumnParallelLinear, Linear, RowParallelLinear, SparseMoE
from baton_kernels.linear import can_pack, pack_weight


@torch.no_grad()
def pack_weights(model: CausalLM) -> None:
    """Packs every weight that is multiplied by, in place, one by one; the plain ones are freed, except that of a tied embedding.

    Does nothing where oneDNN does not multiply in the model's dtype. A packed model cannot be filled again: load another.
    """
    if not can_pack(next(model.parameters())):
        return
    for module in model.modules():
        if isinstance(module, (Linear, ColumnParallelLinear, RowParallelLinear)):
            module.weight = _packed(module.weight)
        elif isinstance(module, SparseMoE):
            for weights in (module.gate_up, module.down):
                for expert, weight in enumerate(weights):
                    weights[expert] = _packed(weight)
    head = model.lm_head or (model.embed_tokens if model.parallel.is_last_stage else None)
    if head is None:
        return
    if head is model.embed_tokens and model.parallel.is_first_stage:
        head.packed_weight = _packed(head.weight)
    else:
        head.weight = _packed(head.weight)


def _packed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(pack_weight(weight), requires_grad=False)
