"""Parses and checks config.json of a Hugging Face checkpoint, without torch.

Both formats are supported: transformers 4 (`rope_theta` and `rope_scaling`) and transformers 5
(`rope_parameters`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_engine.models.checkpoint.pooling_config import (
    PoolingConfig,
    PoolingType,
    load_pooling_config,
)
from baton_engine.models.errors import ModelInvalid, ModelNotFound
from baton_protocol.checkpoint_files import read_json
from baton_protocol.pooling_params import PairFormat, Task

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # in layer_types

Json = dict[str, Any]  # not validated yet

#: Largest accepted sizes: several times the sizes of the largest known models. They limit the
#: modules that are created before the shapes of the weights are checked.
_LARGEST = {
    "num_hidden_layers": 1024,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**12,
    "vocab_size": 2**22,
    "max_position_embeddings": 2**24,
    "original_max_position_embeddings": 2**24,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "type_vocab_size": 2**12,
}
_MAX_LAYERS_TIMES_EXPERTS = 2**17


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
    pooling: PoolingConfig | None = None  # from other files; None: the model generates
    is_encoder: bool = False  # every token attends to the whole prompt
    layer_norm_eps: float = 1e-12  # encoders only
    num_token_types: int = 0  # type_vocab_size, encoders only
    num_labels: int = 0  # of classifiers

    @property
    def task(self) -> Task:
        return Task.GENERATE if self.pooling is None else self.pooling.task

    @property
    def pair_format(self) -> PairFormat | None:
        """How two texts are joined into one prompt. None: the model cannot score text pairs."""
        if self.task is not Task.CLASSIFY:
            return None
        return PairFormat.TOKENIZER if self.is_encoder else PairFormat.QWEN3_RERANKER

    @property
    def runs_whole_prompts(self) -> bool:
        """Whether all tokens of a prompt must be computed, so that no cached prefix is used."""
        pooling = self.pooling
        return pooling is not None and (pooling.type is not PoolingType.LAST or self.is_encoder)


def load_checkpoint_config(
    path: Path, runner: str = "auto", label_tokens: Sequence[str] = ()
) -> CheckpointConfig:
    """Parse config.json, generation_config.json and the files about pooling in `path`.

    Args:
        path: folder of the checkpoint.
        runner: value of the option `model.runner`.
        label_tokens: value of the option `model.classifier_from_token`. Empty: the value in
            config.json, if there is one.

    Raises:
        ModelNotFound: `path` is not an existing folder.
        ModelInvalid: config.json is missing, a file is malformed, or the model needs a feature
            that Baton lacks.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ModelNotFound(
            f"{path} {what}: a model is the folder of a checkpoint on this machine; LLM and "
            "baton serve download ORG/NAME and hf://, s3:// and gs:// URIs"
        )
    config = _read(path, CONFIG_FILE)
    file = path / CONFIG_FILE
    try:
        parsed = _parse(config)
        if os.path.lexists(path / GENERATION_CONFIG_FILE):
            file = path / GENERATION_CONFIG_FILE
            generation = _read(path, GENERATION_CONFIG_FILE)
            if "eos_token_id" in generation:
                eos_token_ids = _parse_eos(generation["eos_token_id"])
                parsed = dataclasses.replace(parsed, eos_token_ids=eos_token_ids)
    except KeyError as error:
        raise ModelInvalid(f"{file}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelInvalid(f"{file}: {error}") from None
    pooling = load_pooling_config(
        path,
        parsed.architecture,
        runner,
        is_encoder=parsed.is_encoder,
        label_tokens=label_tokens or config.get("classifier_from_token") or (),
    )
    if pooling is not None and pooling.has_classifier and parsed.num_labels != 1:
        raise ModelInvalid(
            f"{path / CONFIG_FILE}: the classifier has {parsed.num_labels} labels (id2label); only "
            "classifiers with one label, which score pairs of texts, are supported"
        )
    return dataclasses.replace(parsed, pooling=pooling)


def _read(path: Path, name: str) -> Json:
    try:
        return read_json(path, name)
    except FileNotFoundError:
        raise ModelInvalid(f"{path / name} is missing") from None
    except ValueError as error:
        raise ModelInvalid(str(error)) from None


def _parse(config: Json) -> CheckpointConfig:
    _check_supported(config)
    num_layers = _positive(config, "num_hidden_layers")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = (
        _positive(config, "num_key_value_heads") if "num_key_value_heads" in config else num_heads
    )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    hidden_size = _positive(config, "hidden_size")
    head_dim = _positive(config, "head_dim") if config.get("head_dim") else hidden_size // num_heads
    if head_dim % 2 or not head_dim:
        raise ValueError(f"head_dim must be even and positive, got {head_dim}")
    max_position_embeddings = _positive(config, "max_position_embeddings")
    rope_theta, rope_scaling = _parse_rope(config, max_position_embeddings)
    if isinstance(rope_scaling, YarnRopeScaling):
        stretched = int(rope_scaling.factor * rope_scaling.original_max_position_embeddings)
        if stretched > _LARGEST["max_position_embeddings"]:
            raise ValueError(
                f"factor of the rope scaling is {rope_scaling.factor}; at most "
                f"{_LARGEST['max_position_embeddings']} positions are supported"
            )
        max_position_embeddings = max(max_position_embeddings, stretched)
    sliding_window = _parse_window(config)
    intermediate_size = _positive(config, "intermediate_size")
    num_experts = _parse_num_experts(config, num_layers)
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
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=sliding_window,
        windowed_layers=_parse_windowed_layers(config, num_layers)
        if sliding_window
        else frozenset(),
        eos_token_ids=_parse_eos(config.get("eos_token_id")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        num_experts=num_experts,
        num_experts_per_tok=_positive(config, "num_experts_per_tok") if num_experts else 0,
        moe_intermediate_size=_parse_moe_intermediate_size(config, intermediate_size)
        if num_experts
        else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        sparse_layers=_parse_sparse_layers(config, num_layers) if num_experts else frozenset(),
        is_encoder=config.get("model_type") == "bert",
        layer_norm_eps=_number(config, "layer_norm_eps", 1e-12),
        num_token_types=_positive({"type_vocab_size": 2} | config, "type_vocab_size"),
        num_labels=len(config["id2label"]) if config.get("id2label") else 2,
    )


def _parse_num_experts(config: Json, num_layers: int) -> int:
    """Return the number of experts of a sparse layer; 0 for a dense model."""
    name = "num_experts" if config.get("num_experts") else "num_local_experts"
    if not config.get(name):
        return 0
    num_experts = _positive(config, name)
    if num_experts * num_layers > _MAX_LAYERS_TIMES_EXPERTS:
        raise ValueError(
            f"{name} times num_hidden_layers is {num_experts * num_layers}; at most "
            f"{_MAX_LAYERS_TIMES_EXPERTS} experts can be loaded"
        )
    return num_experts


def _parse_sparse_layers(config: Json, num_layers: int) -> frozenset[int]:
    dense_layers = set(config.get("mlp_only_layers") or [])
    step = _positive({"decoder_sparse_step": 1} | config, "decoder_sparse_step")
    return frozenset(i for i in range(num_layers) if i not in dense_layers and (i + 1) % step == 0)


def _check_supported(config: Json) -> None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) for name in architectures or [None]
    ):
        raise ValueError("architectures must name the model class")
    if config.get("quantization_config"):
        raise ValueError(
            "quantization_config is set, but only unquantized checkpoints can be loaded"
        )
    is_encoder = config.get("model_type") == "bert"
    activation = "gelu" if is_encoder else "silu"
    if config.get("hidden_act", activation) != activation:
        raise ValueError(f"hidden_act must be {activation}, got {config['hidden_act']}")
    if is_encoder and config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(
            f"position_embedding_type must be absolute, got {config['position_embedding_type']}"
        )
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
        first = config.get("max_window_layers", 0)
        if type(first) is not int or first < 0:
            raise ValueError(f"max_window_layers must be an integer from 0 on, got {first!r}")
        return frozenset(range(first, num_layers))
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
    theta = _number(parameters, "rope_theta", 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(
            f"rope_type {kind!r} is not supported; known: default, linear, llama3, yarn"
        )
    factor = _number(parameters, "factor")
    if factor < 1:
        raise ValueError(f"factor of the rope scaling must be at least 1, got {factor}")
    if kind == "linear":
        return theta, LinearRopeScaling(factor=factor)
    name = "original_max_position_embeddings"
    original = _positive(parameters, name) if parameters.get(name) else max_position_embeddings
    if kind == "llama3":
        return theta, Llama3RopeScaling(
            factor=factor,
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
            original_max_position_embeddings=original,
        )
    if theta <= 1:
        raise ValueError(f"rope_theta must be above 1 with YaRN, got {theta}")
    return theta, YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number(parameters, "beta_fast", 32),
        beta_slow=_number(parameters, "beta_slow", 1),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(parameters, factor),
    )


def _yarn_attention_factor(parameters: Json, factor: float) -> float:
    """Return YaRN's attention factor, by which cosines and sines are multiplied.

    The config's `attention_factor` is used if set. If `mscale` and `mscale_all_dim` are set
    instead, DeepSeek's formula is used. Otherwise, the formula of Peng et al. 2023, section 3.4, is
    used.
    """

    def sharpening(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return sharpening(_number(parameters, "mscale")) / sharpening(
            _number(parameters, "mscale_all_dim")
        )
    return sharpening(1.0)


def _parse_eos(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    token_ids = value if isinstance(value, list) else [value]
    largest = _LARGEST["vocab_size"]
    if not all(type(token_id) is int and 0 <= token_id < largest for token_id in token_ids):
        raise ValueError(f"eos_token_id must be token ids below {largest}, got {value!r}")
    return tuple(token_ids)


def _positive(config: Json, name: str) -> int:
    value = config[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value > _LARGEST.get(name, value):
        raise ValueError(f"{name} must be at most {_LARGEST[name]}, got {value}")
    return value


def _number(config: Json, name: str, default: float | None = None) -> float:
    """Return the positive, finite number in field `name` of a config.

    `default`, if given, replaces a missing value, null and 0.
    """
    value = float(config[name] if default is None else config.get(name) or default)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive, finite number, got {value}")
    return value
