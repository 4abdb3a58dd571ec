"""Writes the folder of a checkpoint: configuration, weights and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from baton_engine.random_checkpoint.shape import SIZES, CheckpointShape
from baton_engine.random_checkpoint.tokenizer_files import END_OF_TEXT, TURN_END, write_tokenizer
from baton_engine.random_checkpoint.weights import random_weights, write_weights

#: Architecture by config.json's model_type.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
#: Architectures of encoders by model_type. Encoders generate no text.
ENCODERS = {"bert": "BertModel"}
DTYPES = ("float32", "bfloat16", "float16")
ROPE_SCALINGS = ("linear", "llama3", "yarn")
#: Field in config.json of the pooling module that selects each pooling.
POOLINGS = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}


def create_checkpoint(
    out: Path,
    arch: str,
    *,
    size: str = "tiny",
    rope_scaling: str | None = None,
    rope_factor: float = 4.0,
    sliding_window: int | None = None,
    tie_word_embeddings: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    pooling: str | None = None,
    classifier: bool = False,
    max_shard_size: int | None = None,
    **sizes: int,
) -> Path:
    """Write config, random weights and tokenizer to `out`. Equal arguments give equal files.

    Args:
        out: folder to write. It is created if missing, and must be empty.
        arch: a key of ARCHITECTURES or ENCODERS.
        size: a key of SIZES.
        rope_scaling: how the rotary embedding is scaled: linear, llama3 or yarn. None: not scaled.
        rope_factor: factor of `rope_scaling`. max_position_embeddings is the length after scaling.
        sliding_window: number of tokens that a token attends to. None: all. In qwen2 and qwen3 only
            the second half of the layers use the window, in other architectures all layers. llama
            has no window.
        dtype: type of the stored weights: float32, bfloat16 or float16.
        pooling: last, mean or cls: write an embedding model with this pooling, like
            Qwen3-Embedding. It has no output layer, and has the module files of
            `sentence-transformers`. None: write a generating model, or an encoder without module
            files.
        classifier: write a model that scores pairs of texts, such as Qwen3-Reranker in the form of
            Qwen3ForSequenceClassification.
        max_shard_size: maximum bytes per weight file. None: one file without an index.
        **sizes: fields of CheckpointShape that replace those of the preset.

    Returns:
        `out`.

    Raises:
        ValueError: an argument is out of bounds. The message names the argument.
        FileExistsError: `out` is not empty.
    """
    _one_of("arch", arch, {**ARCHITECTURES, **ENCODERS})
    _one_of("size", size, SIZES)
    _one_of("dtype", dtype, DTYPES)
    for name in sizes:
        _one_of("a size", name, [field.name for field in fields(CheckpointShape)])
    shape = replace(SIZES[size], **sizes)
    shape.validate()
    if rope_scaling is not None:
        _one_of("rope_scaling", rope_scaling, ROPE_SCALINGS)
    if pooling is not None:
        _one_of("pooling", pooling, POOLINGS)
        if classifier:
            raise ValueError("pooling is for embeddings: leave it out for a classifier")
    if not 1 <= rope_factor <= shape.max_position_embeddings:
        raise ValueError(
            f"rope_factor must be between 1 and max_position_embeddings, got {rope_factor}"
        )
    if sliding_window is not None and (sliding_window < 1 or arch == "llama"):
        raise ValueError(
            f"sliding_window must be positive, and is not for llama; "
            f"got {sliding_window} for {arch}"
        )
    if max_shard_size is not None and max_shard_size < 1:
        raise ValueError(f"max_shard_size must be positive, got {max_shard_size}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; choose another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(
        out, shape.vocab_size, shape.max_position_embeddings, marks_texts=arch in ENCODERS
    )
    if arch in ENCODERS:
        config = _encoder_config(arch, shape)
    else:
        config = _config(arch, shape) | _window_config(arch, shape, sliding_window)
        config |= {
            "rope_scaling": _rope_config(rope_scaling, rope_factor, shape.max_position_embeddings),
            "tie_word_embeddings": tie_word_embeddings,
        }
    if classifier:
        [architecture] = config["architectures"]
        name = architecture.removesuffix("Model").removesuffix("ForCausalLM")
        config["architectures"] = [f"{name}ForSequenceClassification"]
        config["id2label"] = {"0": "LABEL_0"}
    config |= {
        "eos_token_id": vocabulary[TURN_END],
        "pad_token_id": vocabulary[END_OF_TEXT],
        "torch_dtype": dtype,
    }
    _write_json(out / "config.json", config)
    generation = {
        "eos_token_id": [vocabulary[TURN_END], vocabulary[END_OF_TEXT]],
        "pad_token_id": vocabulary[END_OF_TEXT],
    }
    _write_json(out / "generation_config.json", generation)
    if pooling is not None:
        _write_modules(out, pooling, shape.hidden_size)
    write_weights(out, random_weights(out, len(vocabulary), seed, dtype), max_shard_size)
    return out


def _config(arch: str, shape: CheckpointShape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.moe_intermediate_size
        if arch == "mixtral"
        else shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": None,
    }
    if arch in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = False
    if arch == "mixtral":
        config |= {
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
        }
    if arch == "qwen3_moe":
        config |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
            "moe_intermediate_size": shape.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _encoder_config(arch: str, shape: CheckpointShape) -> dict[str, Any]:
    return {
        "architectures": [ENCODERS[arch]],
        "model_type": arch,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "hidden_act": "gelu",
        "max_position_embeddings": shape.max_position_embeddings,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }


def _write_modules(out: Path, pooling: str, hidden_size: int) -> None:
    """Write the files with which `sentence-transformers` describes an embedding model."""
    folders = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": folder,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, folder) in enumerate(folders.items())
    ]
    _write_json(out / "modules.json", modules)
    (out / folders["Pooling"]).mkdir()
    fields = {name: mode == pooling for mode, name in POOLINGS.items()}
    config = {"word_embedding_dimension": hidden_size, **fields}
    _write_json(out / folders["Pooling"] / "config.json", config)


def _window_config(arch: str, shape: CheckpointShape, sliding_window: int | None) -> dict[str, Any]:
    if arch in ("mistral", "mixtral"):
        return {"sliding_window": sliding_window}
    if sliding_window is None:
        return {}
    config: dict[str, Any] = {"sliding_window": sliding_window, "use_sliding_window": True}
    if arch in ("qwen2", "qwen3"):
        config["max_window_layers"] = shape.num_layers // 2
    return config


def _rope_config(
    kind: str | None, factor: float, max_position_embeddings: int
) -> dict[str, Any] | None:
    if kind is None:
        return None
    config: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind != "linear":
        config["original_max_position_embeddings"] = int(max_position_embeddings / factor)
    if kind == "llama3":
        config |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return config


def _one_of(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
