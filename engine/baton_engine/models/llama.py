"""Llama (Touvron et al. 2023; Llama 3): grouped-query attention, rotary embedding, gated MLP."""

from __future__ import annotations

from baton_engine.models.config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP


class LlamaForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int) -> DecoderLayer:
        return DecoderLayer(
            config,
            attention=Attention(config, layer, qk_norm=False),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias),
        )
