"""Qwen3-MoE (Qwen team 2025): Qwen3 with a mixture of experts as the MLP of most layers."""

from __future__ import annotations

from baton_engine.distributed.group import Group
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer, GatedMLP
from baton_engine.models.registry import register
from baton_engine.models.sparse_moe import SparseMoE


@register
class Qwen3MoeForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int, group: Group) -> DecoderLayer:
        attention = Attention(
            config,
            group,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=True,
            window=config.sliding_window,
        )
        if layer in config.sparse_layers:
            return DecoderLayer(
                config, attention, SparseMoE(config, group, renormalize=config.norm_topk_prob)
            )
        return DecoderLayer(
            config, attention, GatedMLP(config.hidden_size, config.intermediate_size, group)
        )
