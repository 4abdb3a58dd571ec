"""Linear layers over tensor ranks: replicated, column-parallel and row-parallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from baton_engine.distributed.group import Group
from baton_engine.models.checkpoint.sharding import Part, WeightTarget, WeightTargets, whole_targets
from baton_engine.models.operators import all_reduce
from baton_kernels.linear import linear


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """Replicated linear layer: y = x W^T with the whole W on every rank."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def weight_targets(self, prefix: str) -> WeightTargets:
        return whole_targets(prefix, {"weight": self.weight})


class ColumnParallelLinear(nn.Module):
    """Column-parallel linear layer: y = x W^T + b for this rank's part of the outputs.

    The weight fuses one or more linear layers of the checkpoint. y concatenates their outputs.

    Args:
        in_features: number of inputs.
        parts: this rank's rows of each fused layer, by the layer's name in the checkpoint.
        bias: whether the fused layers have biases.
    """

    def __init__(self, in_features: int, parts: dict[str, Part], bias: bool) -> None:
        super().__init__()
        self.parts = parts
        out_features = sum(part.length for part in parts.values())
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def weight_targets(self, prefix: str) -> WeightTargets:
        targets: WeightTargets = {}
        row = 0
        for name, part in self.parts.items():
            rows = slice(row, row + part.length)
            row += part.length
            shape = (part.total, self.weight.shape[1])
            targets[f"{prefix}.{name}.weight"] = WeightTarget(
                self.weight[rows], shape, start=part.start
            )
            if self.bias is not None:
                targets[f"{prefix}.{name}.bias"] = WeightTarget(
                    self.bias[rows], (part.total,), start=part.start
                )
        return targets


class RowParallelLinear(nn.Module):
    """Row-parallel linear layer: y = x W^T + b, where each rank has a part of the inputs x.

    An all-reduce sums the ranks' products.
    """

    def __init__(self, part: Part, out_features: int, bias: bool, group: Group) -> None:
        super().__init__()
        self.part, self.group = part, group
        self.weight = parameter(out_features, part.length)
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return linear(x, self.weight, self.bias)
        y = all_reduce(linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias  # added once, not once per rank

    def weight_targets(self, prefix: str) -> WeightTargets:
        shape = (self.weight.shape[0], self.part.total)
        targets = {
            f"{prefix}.weight": WeightTarget(self.weight, shape, dim=1, start=self.part.start)
        }
        if self.bias is not None:
            targets[f"{prefix}.bias"] = WeightTarget(self.bias, tuple(self.bias.shape))
        return targets
