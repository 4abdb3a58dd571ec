"""Qwen3-MoE (Qwen team 2025): Qwen3 with a mixture of experts in place of the MLP of most layers."""

from __future__ import annotations

from baton_engine.models.config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP, SparseMoE


class Qwen3MoeForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int) -> DecoderLayer:
        sparse = layer in config.sparse_layers
        return DecoderLayer(
            config,
            attention=Attention(config, layer, qk_norm=True),
            mlp=SparseMoE(config) if sparse else GatedMLP(config.hidden_size, config.intermediate_size, bias=False),
        )
