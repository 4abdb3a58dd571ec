"""Exchanges a step's hidden states and routed experts with the adjacent pipeline stages."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_engine.worker.model_spec import ModelSpec


class PipelineStage:
    """The connection of one rank to the adjacent pipeline stages.

    Receive a step's hidden states before its routed experts, because `send` sends in this order.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._pipeline = spec.parallel.pipeline

    def receive_hidden(self, num_tokens: int) -> Tensor | None:
        """Receive hidden states [num_tokens, hidden_size]. Return None on the first stage."""
        spec = self._spec
        if spec.parallel.is_first_stage:
            return None
        shape = (num_tokens, spec.model_config.hidden_size)
        buffer = torch.empty(shape, dtype=spec.dtype, device=spec.device)
        return self._pipeline.recv(buffer, self._pipeline.rank - 1)

    def receive_routed_experts(self, num_tokens: int) -> list[Tensor]:
        """Receive the ids of the experts that the sparse layers of earlier stages chose.

        Returns:
            One tensor [num_tokens, experts per token] per sparse layer of earlier stages. The
            sparse layers of this stage append their own tensors to this list.
        """
        model, first_layer = self._spec.model_config, self._spec.shard.first_layer
        earlier = sum(layer < first_layer for layer in model.sparse_layers)
        if not earlier:
            return []
        shape = (earlier, num_tokens, model.num_experts_per_tok)
        buffer = torch.empty(shape, dtype=torch.int32, device=self._spec.device)
        return list(self._pipeline.recv(buffer, self._pipeline.rank - 1))

    def send(self, hidden: Tensor, routed_experts: list[Tensor] | None) -> None:
        """Send hidden states and routed experts, if there are any, to the next stage."""
        self._pipeline.send(hidden, self._pipeline.rank + 1)
        if routed_experts:
            self._pipeline.send(torch.stack(routed_experts).int(), self._pipeline.rank + 1)
