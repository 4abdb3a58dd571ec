"""Qwen2 and Qwen2.5 (Qwen team 2024): Llama's layer with biases on q, k and v.

Late layers may have a sliding window.
"""

from __future__ import annotations

from baton_engine.distributed.group import Group
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP
from baton_engine.models.registry import register


@register
class Qwen2ForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int, group: Group) -> DecoderLayer:
        window = config.sliding_window if layer in config.windowed_layers else None
        return DecoderLayer(
            config,
            attention=Attention(config, group, qkv_bias=True, window=window),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size, group),
        )
