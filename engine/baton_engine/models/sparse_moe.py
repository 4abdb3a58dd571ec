"""Mixture-of-experts layer, with all experts on this rank or expert-parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from baton_engine.distributed.group import Group
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.checkpoint.sharding import WeightTarget, WeightTargets, split
from baton_engine.models.expert_shard import ExpertShard
from baton_engine.models.operators import (
    all_reduce,
    exchange_tokens,
    mix_experts,
    mix_parallel_experts,
)
from baton_engine.models.projections import Linear, parameter


class ExpertNames(NamedTuple):
    """Names of an expert's three projections in the checkpoint."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


PROJECTIONS = ExpertNames()


class SparseMoE(nn.Module):
    """Mixture of experts: a router chooses `num_experts_per_tok` gated MLPs per token.

    Every tensor rank has the whole router and a slice of each expert. After `leave_out_experts` the
    layer is expert-parallel: it runs the experts of `shard`, which may be replaced between steps.

    Args:
        config: the checkpoint's configuration.
        group: tensor ranks.
        renormalize: whether the routing weights of a token's chosen experts are scaled to sum to 1.
        names: names of an expert's projections in the checkpoint.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        group: Group,
        *,
        renormalize: bool,
        names: ExpertNames = PROJECTIONS,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize, self.names = config.num_experts_per_tok, renormalize, names
        self.part, self.group = split(config.moe_intermediate_size, group), group
        self.gate = Linear(config.hidden_size, config.num_experts)
        hidden_size, length, num_experts = config.hidden_size, self.part.length, config.num_experts
        # All experts share one allocation, as GPU kernels expect. `separate_experts` splits it.
        self.gate_up: nn.Parameter | nn.ModuleList = parameter(num_experts, 2 * length, hidden_size)
        self.down: nn.Parameter | nn.ModuleList = parameter(num_experts, hidden_size, length)
        self.is_expert_parallel = False
        self.shard: ExpertShard | None = None  # None until experts are placed on ranks

    def forward(self, x: Tensor) -> Tensor:
        if self.is_expert_parallel:
            y = mix_parallel_experts(x, self.gate(x), self.shard, self.top_k, self.renormalize)
        else:
            y = mix_experts(x, self.gate(x), self.gate_up, self.down, self.top_k, self.renormalize)
        return all_reduce(y, self.group)

    def run_dummy_batch(self) -> None:
        """Run this rank's experts on other ranks' tokens, in a step without tokens of this rank."""
        if self.shard is not None:
            router = self.gate.weight
            device = self.shard.tokens.device
            weights = torch.empty((0, self.top_k), dtype=router.dtype, device=device)
            ids = torch.empty((0, self.top_k), dtype=torch.int64, device=device)
            exchange_tokens(self.shard, weights.new_empty((0, router.shape[1])), weights, ids)

    def leave_out_experts(self) -> None:
        """Remove the expert parameters, so that the layer runs the experts of `shard` instead.

        Call this method before memory for the parameters is allocated.
        """
        del self.gate_up, self.down
        self.is_expert_parallel = True

    def new_expert(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Allocate uninitialized weights for this tensor rank's slice of one expert.

        Returns:
            Gate and up projections [2 * length, hidden_size], and down projection [hidden_size,
            length]. length is this rank's part of the experts' intermediate size.
        """
        hidden_size, length = self.gate.weight.shape[1], self.part.length
        gate_up = torch.empty((2 * length, hidden_size), dtype=dtype, device=device)
        return gate_up, torch.empty((hidden_size, length), dtype=dtype, device=device)

    def separate_experts(self, prepare: Callable[[Tensor], nn.Module]) -> None:
        """Replace the stacked weights with one module per expert, made by `prepare`.

        CPU kernels need this form. Afterwards, the checkpoint can no longer be loaded into the
        model. During the call, memory holds one projection's weights twice.
        """
        for name in ("gate_up", "down"):
            prepared = [prepare(weight) for weight in getattr(self, name)]
            delattr(self, name)  # torch refuses to replace a parameter by anything else
            setattr(self, name, nn.ModuleList(prepared))

    def weight_targets(self, prefix: str) -> WeightTargets:
        targets = self.gate.weight_targets(f"{prefix}.gate")
        if not self.is_expert_parallel:
            for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
                targets |= self.expert_targets(prefix, expert, gate_up, down)
        return targets

    def expert_targets(
        self, prefix: str, expert: int, gate_up: Tensor, down: Tensor
    ) -> WeightTargets:
        """Return the `WeightTarget` of each weight of one expert, by name in the checkpoint.

        The tensors to fill are `gate_up` and `down`, which have the shapes from `new_expert`.
        """
        total, start, length = self.part
        hidden_size = down.shape[0]
        name = f"{prefix}.experts.{expert}"
        gate, up = gate_up.split(length)
        return {
            f"{name}.{self.names.gate}.weight": WeightTarget(
                gate, (total, hidden_size), start=start
            ),
            f"{name}.{self.names.up}.weight": WeightTarget(up, (total, hidden_size), start=start),
            f"{name}.{self.names.down}.weight": WeightTarget(
                down, (hidden_size, total), dim=1, start=start
            ),
        }
