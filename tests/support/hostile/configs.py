"""Attacks by config.json and generation_config.json. For the tests of the loader and LLM."""

from __future__ import annotations

from typing import Any

from support.hostile.attack import Attack, content, fields, file_attacks, nested, sparse

CONFIG = "config.json"
GENERATION = "generation_config.json"
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}


def _config(message: str, **changes: Any) -> Attack:
    name, value = next(iter(changes.items()))
    return Attack(f"{name}-{str(value)[:24]}", CONFIG, fields(**changes), message)


def _text_attacks(file: str) -> list[Attack]:
    return [
        *file_attacks(file),
        Attack(f"{file}-deep", file, nested('{"a":', "}"), "nested too deeply"),
        Attack(f"{file}-list", file, content("[]"), "must hold a JSON object"),
        Attack(f"{file}-not-utf8", file, content(b'{"a": "\xff"}'), "cannot be read"),
        Attack(f"{file}-twice", file, content('{"a": 1, "a": 2}'), "occurs twice"),
        Attack(f"{file}-digits", file, content('{"a": ' + "9" * 10_000 + "}"), "cannot be read"),
        Attack(f"{file}-large", file, sparse, "1073741824 bytes"),
    ]


CONFIG_ATTACKS = [
    *_text_attacks(CONFIG),
    _config("hidden_size", hidden_size=10**12),
    # Below the limits, but far above the weights: refused before memory is allocated.
    _config("has shape", hidden_size=2**18, vocab_size=2**22, intermediate_size=2**20),
    _config("hidden_size", hidden_size=-64),
    _config("hidden_size", hidden_size=True),
    _config("hidden_size", hidden_size="64"),
    _config("hidden_size", hidden_size=float("nan")),
    _config("num_hidden_layers", num_hidden_layers=10**9),
    _config("head_dim", num_attention_heads=2**14, num_key_value_heads=1, head_dim=None),
    _config("num_attention_heads", num_attention_heads=10**9),
    _config("num_key_value_heads", num_key_value_heads=0),
    _config("head_dim", head_dim=10**9),
    _config("vocab_size", vocab_size=10**15),
    _config("max_position_embeddings", max_position_embeddings=10**18),
    _config("intermediate_size", intermediate_size=[1]),
    _config("num_experts", num_experts=10**9),
    _config("at most 131072 experts", num_experts=4096, num_hidden_layers=1000),
    _config("num_experts", num_experts=float("inf")),
    _config("decoder_sparse_step", decoder_sparse_step=0, num_experts=2, num_experts_per_tok=1),
    _config("unhashable", mlp_only_layers=[[]], num_experts=2, num_experts_per_tok=1),
    _config("max_window_layers", max_window_layers="x", use_sliding_window=True, sliding_window=4),
    _config(
        "max_window_layers",
        max_window_layers=-(10**9),
        use_sliding_window=True,
        sliding_window=4,
    ),
    _config("rms_norm_eps", rms_norm_eps=float("nan")),
    _config("rope_theta", rope_theta=float("inf")),
    _config("rope_theta", rope_theta=-1.0),
    _config("rope_theta", rope_theta=1.0, rope_scaling=YARN),
    _config("factor", rope_scaling=YARN | {"factor": float("nan")}),
    _config("positions are supported", rope_scaling=YARN | {"factor": 1e12}),
    _config("cannot convert", rope_scaling=YARN | {"factor": 1e308}),
    _config("config.json", rope_scaling="linear"),
    _config("config.json", rope_scaling=[1]),
    _config("architectures", architectures=[{}]),
    _config("architectures", architectures="Qwen3ForCausalLM"),
    _config("config.json", layer_types=[{}]),
    _config("eos_token_id", eos_token_id="2"),
    _config("eos_token_id", eos_token_id=[2, None]),
    _config("eos_token_id", eos_token_id=-1),
]

GENERATION_ATTACKS = [
    *_text_attacks(GENERATION),
    Attack("generation-eos", GENERATION, fields(eos_token_id=[[2]]), "eos_token_id"),
    Attack("generation-eos-huge", GENERATION, fields(eos_token_id=2**40), "eos_token_id"),
]
