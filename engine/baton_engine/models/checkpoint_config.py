"""Parses and checks config.json of a Hugging Face checkpoint, without torch.

Both formats are supported: transformers 4 (`rope_theta` and `rope_scaling`) and transformers 5
(`rope_parameters`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_engine.models.errors import ModelInvalid, ModelNotFound

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # in layer_types

Json = dict[str, Any]  # not validated yet


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """RoPE scaling of Llama 3.1, which divides low frequencies by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling:
    """RoPE scaling by position interpolation, which divides all frequencies by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling:
    """RoPE scaling of YaRN, which divides low frequencies by `factor` and scales attention."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float  # multiplies cosines and sines


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Fields of config.json that models use. A comment gives the original name if it differs."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    num_kv_heads: int  # num_key_value_heads
    head_dim: int
    max_position_embeddings: int  # with YaRN, the extended length
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None  # tokens that a token attends to, including itself; None: no limit
    windowed_layers: frozenset[int]  # layers with a window, in Qwen2 and Qwen3 only
    eos_token_ids: tuple[int, ...]  # from generation_config.json, else from config.json
    dtype: str  # dtype of the weights, such as "bfloat16"
    num_experts: int  # 0: a dense model
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]  # layers whose MLP is a mixture of experts


def load_checkpoint_config(path: Path) -> CheckpointConfig:
    """Parse config.json and generation_config.json in `path`.

    Raises:
        ModelNotFound: `path` is not an existing folder.
        ModelInvalid: config.json is missing, a file is malformed, or the model needs a feature
            that Baton lacks.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ModelNotFound(
            f"{path} {what}: a model is the folder of a checkpoint on this machine; "
            f"nothing is downloaded"
        )
    config = _read_json(path / CONFIG_FILE)
    generation = (
        _read_json(path / GENERATION_CONFIG_FILE)
        if (path / GENERATION_CONFIG_FILE).exists()
        else {}
    )
    try:
        return _parse(config, generation)
    except KeyError as error:
        raise ModelInvalid(f"{path / CONFIG_FILE}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelInvalid(f"{path / CONFIG_FILE}: {error}") from None


def _read_json(file: Path) -> Json:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelInvalid(f"{file} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelInvalid(f"{file} must hold a JSON object")
    return content


def _parse(config: Json, generation: Json) -> CheckpointConfig:
    _check_supported(config)
    num_layers = _positive(config, "num_hidden_layers")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = (
        _positive(config, "num_key_value_heads") if "num_key_value_heads" in config else num_heads
    )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
        )
    hidden_size = _positive(config, "hidden_size")
    head_dim = _positive(config, "head_dim") if config.get("head_dim") else hidden_size // num_heads
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    max_position_embeddings = _positive(config, "max_position_embeddings")
    rope_theta, rope_scaling = _parse_rope(config, max_position_embeddings)
    if isinstance(rope_scaling, YarnRopeScaling):
        stretched = int(rope_scaling.factor * rope_scaling.original_max_position_embeddings)
        max_position_embeddings = max(max_position_embeddings, stretched)
    sliding_window = _parse_window(config)
    intermediate_size = _positive(config, "intermediate_size")
    num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    return CheckpointConfig(
        architecture=config["architectures"][0],
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=sliding_window,
        windowed_layers=_parse_windowed_layers(config, num_layers)
        if sliding_window
        else frozenset(),
        eos_token_ids=_parse_eos(generation.get("eos_token_id", config.get("eos_token_id"))),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        num_experts=num_experts,
        num_experts_per_tok=_positive(config, "num_experts_per_tok") if num_experts else 0,
        moe_intermediate_size=_parse_moe_intermediate_size(config, intermediate_size)
        if num_experts
        else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        sparse_layers=_parse_sparse_layers(config, num_layers) if num_experts else frozenset(),
    )


def _parse_sparse_layers(config: Json, num_layers: int) -> frozenset[int]:
    dense_layers = set(config.get("mlp_only_layers") or [])
    step = int(config.get("decoder_sparse_step", 1))
    return frozenset(i for i in range(num_layers) if i not in dense_layers and (i + 1) % step == 0)


def _check_supported(config: Json) -> None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ValueError("architectures must name the model class")
    if config.get("quantization_config"):
        raise ValueError(
            "quantization_config is set, but only unquantized checkpoints can be loaded"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be silu, got {config['hidden_act']}")
    other = set(config.get("layer_types") or []) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if other:
        raise ValueError(
            f"layer_types has {', '.join(sorted(other))}; "
            f"known: {FULL_ATTENTION}, {SLIDING_ATTENTION}"
        )


def _parse_window(config: Json) -> int | None:
    """Return the sliding window in tokens, or None if attention has no window.

    Qwen configs contain a window that applies only if `use_sliding_window` is true.

    Raises:
        KeyError: `sliding_window` is missing from a config that must have it: Mistral, or Qwen with
            `use_sliding_window`.
    """
    model_type = str(config.get("model_type"))
    if model_type.startswith("qwen") and not config.get("use_sliding_window"):
        return None
    assumed = model_type.startswith(("qwen", "mistral"))
    window = config["sliding_window"] if assumed else config.get("sliding_window")
    return None if window is None else _positive(config, "sliding_window")


def _parse_windowed_layers(config: Json, num_layers: int) -> frozenset[int]:
    """Return the indices of the layers with a sliding window.

    `layer_types` (transformers 5) takes precedence over `max_window_layers` (transformers 4).
    """
    layer_types = config.get("layer_types")
    if layer_types is None:
        return frozenset(range(int(config.get("max_window_layers", 0)), num_layers))
    if len(layer_types) != num_layers:
        raise ValueError(
            f"layer_types has {len(layer_types)} entries for num_hidden_layers={num_layers}"
        )
    return frozenset(layer for layer, kind in enumerate(layer_types) if kind == SLIDING_ATTENTION)


def _parse_moe_intermediate_size(config: Json, intermediate_size: int) -> int:
    """Return the intermediate size of an expert.

    Mixtral configs have no `moe_intermediate_size`, and use `intermediate_size` for experts.
    """
    return (
        _positive(config, "moe_intermediate_size")
        if "moe_intermediate_size" in config
        else intermediate_size
    )


def _parse_rope(config: Json, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Return (rope_theta, scaling). The scaling is None for rope type "default".

    `rope_parameters` (transformers 5) overrides `rope_theta` and `rope_scaling` (transformers 4).
    """
    fields = ("rope_theta", "partial_rotary_factor")
    parameters: Json = {name: config[name] for name in fields if config.get(name) is not None}
    parameters |= config.get("rope_scaling") or {}
    parameters |= config.get("rope_parameters") or {}
    theta = float(parameters.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(
            f"rope_type {kind!r} is not supported; known: default, linear, llama3, yarn"
        )
    factor = float(parameters["factor"])
    if factor < 1:
        raise ValueError(f"factor of the rope scaling must be at least 1, got {factor}")
    if kind == "linear":
        return theta, LinearRopeScaling(factor=factor)
    original = int(parameters.get("original_max_position_embeddings") or max_position_embeddings)
    if kind == "llama3":
        return theta, Llama3RopeScaling(
            factor=factor,
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position_embeddings=original,
        )
    return theta, YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(parameters, factor),
    )


def _yarn_attention_factor(parameters: Json, factor: float) -> float:
    """Return YaRN's attention factor, by which cosines and sines are multiplied.

    The config's `attention_factor` is used if set. Otherwise the factor is computed by DeepSeek's
    formula if `mscale` and `mscale_all_dim` are set, else by Peng et al. 2023, section 3.4.
    """

    def sharpening(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return sharpening(float(mscale)) / sharpening(float(mscale_all_dim))
    return sharpening(1.0)


def _parse_eos(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _positive(config: Json, name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value
