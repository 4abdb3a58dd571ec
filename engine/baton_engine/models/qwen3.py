"""Qwen3, dense (Qwen team 2025): Llama's layer with the heads of q and k normalised before the rotary embedding."""

from __future__ import annotations

from baton_engine.models.config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP


class Qwen3ForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int) -> DecoderLayer:
        return DecoderLayer(
            config,
            attention=Attention(config, layer, qk_norm=True),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size, bias=False),
        )
