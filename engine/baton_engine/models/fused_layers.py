"""Joins the layers of a model, with packed or quantized weights, into one operation in C++."""

from __future__ import annotations

from torch import Tensor

from baton_engine.models.forward_context import current_context
from baton_engine.models.layers import CausalLM, DecoderLayer, GatedMLP, Model
from baton_engine.models.projections import ColumnParallelLinear, RowParallelLinear
from baton_engine.models.sparse_moe import SparseMoE
from baton_kernels.decoder_layers import (
    DecoderLayers,
    DenseMLP,
    LayerWeights,
    Projection,
    SparseMLP,
)
from baton_kernels.linear import PackedWeight, QuantizedWeight
from baton_kernels.moe import ExpertList


class FusedModel:
    """The forward pass of a model, with all layers in one compiled C++ operation.

    Steps in which layers report routed experts or written KV run layer by layer instead.
    """

    def __init__(self, model: CausalLM, layers: DecoderLayers) -> None:
        self._model, self._layers = model, layers

    def __call__(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """Run the layers. The result is bitwise equal to that of `CausalLM.forward`."""
        context = current_context()
        if context.reports_by_layer:
            return self._model(input_ids, positions, hidden)
        return self._layers.run(
            input_ids if hidden is None else hidden,
            positions,
            context.kv_cache,
            context.slot_mapping,
            context.block_tables,
            context.cu_seqlens_q,
            context.seq_lens,
        )


def fuse_layers(model: Model) -> FusedModel | None:
    """Return the forward pass of the model in one compiled C++ operation.

    Returns:
        The fused model. None for encoders, for tensor-parallel or expert-parallel models, and for
        models with layers of a subclass of `DecoderLayer`. Also None if the operation cannot read
        the weights.
    """
    if not isinstance(model, CausalLM):
        return None
    # A subclass of DecoderLayer may compute something else than the operation.
    layers = [layer for layer in model.layers if type(layer) is DecoderLayer]
    weights = [each for layer in layers if (each := _weights_of(layer)) is not None]
    if model.parallel.tensor.size > 1 or len(weights) < len(model.layers):
        return None
    attention, rotary, embedding = layers[0].self_attn, model.rotary_embedding, model.embed_tokens
    fused = DecoderLayers(
        weights,
        attention.num_heads,
        attention.scale,
        model.config.rms_norm_eps,
        rotary.inv_freq,
        rotary.scale,
        embedding.weight if model.parallel.is_first_stage and embedding is not None else None,
        None if model.norm is None else model.norm.weight,
    )
    return FusedModel(model, fused)


def _weights_of(layer: DecoderLayer) -> LayerWeights | None:
    attention = layer.self_attn
    qkv, o = _compiled(attention.qkv_proj), _compiled(attention.o_proj)
    mlp = _sparse(layer.mlp) if isinstance(layer.mlp, SparseMoE) else _dense(layer.mlp)
    if qkv is None or o is None or mlp is None:
        return None
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        o=o,
        mlp_norm=layer.post_attention_layernorm.weight,
        mlp=mlp,
        window=attention.window,
    )


def _dense(mlp: GatedMLP) -> DenseMLP | None:
    gate_up, down = _compiled(mlp.gate_up_proj), _compiled(mlp.down_proj)
    return None if gate_up is None or down is None else DenseMLP(gate_up, down)


def _sparse(mlp: SparseMoE) -> SparseMLP | None:
    if mlp.is_expert_parallel:
        return None
    gate_up, down = ExpertList(mlp.gate_up), ExpertList(mlp.down)
    router: object = mlp.gate.weight
    if isinstance(router, PackedWeight):
        router = router.data if router.is_compiled else None
    if not gate_up.data or not down.data or not isinstance(router, Tensor):
        return None
    return SparseMLP(router, gate_up, down, mlp.top_k, mlp.renormalize)


def _compiled(layer: ColumnParallelLinear | RowParallelLinear) -> Projection | None:
    """Return the layer's weight and bias, or None if the C++ operations cannot read the weight."""
    weight: object = layer.weight
    if isinstance(weight, PackedWeight | QuantizedWeight) and weight.is_compiled:
        return Projection(weight, layer.bias)
    return None
