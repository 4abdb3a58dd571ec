"""Joins the layers of a dense model into one compiled operation.

Their weights must be packed or quantized.
"""

from __future__ import annotations

from baton_engine.models.layers import CausalLM, DecoderLayer, GatedMLP
from baton_engine.models.projections import ColumnParallelLinear, RowParallelLinear
from baton_kernels.decoder_layers import DecoderLayers, LayerWeights, Projection
from baton_kernels.linear import PackedWeight, QuantizedWeight


def fuse_layers(model: CausalLM) -> DecoderLayers | None:
    """Return one compiled operation that runs all layers of the model.

    Returns:
        The operation. None if a layer is sparse, if the model is split over tensor ranks, or if
        the C++ operations cannot read a layer's weights.
    """
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    weights = [each for layer in layers if (each := _weights_of(layer)) is not None]
    if model.parallel.tensor.size > 1 or len(weights) < len(model.layers):
        return None
    attention = layers[0].self_attn
    return DecoderLayers(weights, attention.num_heads, attention.scale, model.config.rms_norm_eps)


def _weights_of(layer: DecoderLayer) -> LayerWeights | None:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, GatedMLP):
        return None
    projections = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    qkv, o, gate_up, down = (_compiled(each) for each in projections)
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        o=o,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        down=down,
        window=attention.window,
    )


def _compiled(layer: ColumnParallelLinear | RowParallelLinear) -> Projection | None:
    """Return the layer's weight and bias, or None if the C++ operations cannot read the weight."""
    weight: object = layer.weight
    if isinstance(weight, PackedWeight | QuantizedWeight) and weight.is_compiled:
        return Projection(weight, layer.bias)
    return None
