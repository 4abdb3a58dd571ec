"""Mixtral (Jiang et al. 2024): Mistral's attention and a mixture of experts in every layer."""

from __future__ import annotations

from baton_engine.distributed.group import Group
from baton_engine.models.checkpoint.checkpoint_config import CheckpointConfig
from baton_engine.models.layers import Attention, CausalLM, DecoderLayer
from baton_engine.models.registry import register
from baton_engine.models.sparse_moe import ExpertNames, SparseMoE

NAMES = ExpertNames(gate="w1", up="w3", down="w2")


@register
class MixtralForCausalLM(CausalLM):
    def make_layer(self, config: CheckpointConfig, layer: int, group: Group) -> DecoderLayer:
        return DecoderLayer(
            config,
            attention=Attention(config, group, window=config.sliding_window),
            mlp=SparseMoE(config, group, renormalize=True, names=NAMES),
            mlp_name="block_sparse_moe",
        )
