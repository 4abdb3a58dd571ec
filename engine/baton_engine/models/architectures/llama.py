"""Llama (Touvron et al. 2023; Llama 3): grouped-query attention, rotary embedding, gated MLP."""

from __future__ import annotations

from baton_engine.distributed.group import Group
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP
from baton_engine.models.registry import register


@register
class LlamaForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int, group: Group) -> DecoderLayer:
        return DecoderLayer(
            config,
            attention=Attention(
                config, group, qkv_bias=config.attention_bias, o_bias=config.attention_bias
            ),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size, group, bias=config.mlp_bias),
        )
