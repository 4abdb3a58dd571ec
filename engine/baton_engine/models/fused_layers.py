"""The layers of a dense model with packed weights, as one compiled operation."""

from __future__ import annotations

from baton_engine.models.layers import CausalLM, DecoderLayer, GatedMLP
from baton_engine.models.projections import ColumnParallelLinear, RowParallelLinear
from baton_kernels.decoder_layers import DecoderLayers, LayerWeights
from baton_kernels.linear import PackedWeight


def fuse_layers(model: CausalLM) -> DecoderLayers | None:
    """Return all layers of the model as one operation.

    Returns:
        None if a layer is sparse, tensor ranks share it, or its weights are not packed for cpp.
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
    qkv, o, gate_up, down = (_packed_weight(each) for each in projections)
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=attention.qkv_proj.bias,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        o=o,
        o_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=mlp.gate_up_proj.bias,
        down=down,
        down_bias=mlp.down_proj.bias,
        window=attention.window,
    )


def _packed_weight(layer: ColumnParallelLinear | RowParallelLinear) -> PackedWeight | None:
    """Return the layer's weight, or None if it is not packed for cpp."""
    weight: object = layer.weight
    return weight if isinstance(weight, PackedWeight) and not weight.data.is_mkldnn else None
