"""Qwen3, dense (Qwen team 2025): Llama's layer with RMS norm on the heads of q and k."""

from __future__ import annotations

from baton_engine.distributed.group import Group
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP
from baton_engine.models.registry import register


@register
class Qwen3ForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int, group: Group) -> DecoderLayer:
        attention = Attention(
            config,
            group,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=True,
            window=config.sliding_window if layer in config.windowed_layers else None,
        )
        return DecoderLayer(
            config, attention, GatedMLP(config.hidden_size, config.intermediate_size, group)
        )
