"""Mistral (Jiang et al. 2023): Llama's layer with a sliding window."""

from __future__ import annotations

from baton_engine.distributed.group import Group
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP
from baton_engine.models.registry import register


@register
class MistralForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int, group: Group) -> DecoderLayer:
        return DecoderLayer(
            config,
            attention=Attention(config, group, window=config.sliding_window),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size, group),
        )
