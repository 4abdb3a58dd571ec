"""Makes checkpoints with random weights, in Hugging Face's format: for demos and tests, loadable by Baton and by transformers.

Entry points: `create_checkpoint`, and `add_arguments` / `run` for `baton checkpoint create`. torch and tokenizers are imported
when a checkpoint is made, so that a command line can offer this without loading them.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LOGIT_STD = 3.0
"""Of a random model's logits. The median gap of the two best of n normal values is about 0.7 * std / sqrt(2 ln n): here 0.5."""


@dataclass(frozen=True, kw_only=True)
class CheckpointShape:
    """Sizes of a model. The defaults make a few megabytes that answer fast on one core."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    vocab_size: int = 1024
    max_position_embeddings: int = 4096

    def validate(self) -> None:
        """Raises ValueError naming the field and the bound."""
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size must be at least {MIN_VOCAB_SIZE} (bytes and special tokens), got {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}"
            )


def create_checkpoint(
    out: Path,
    arch: str,
    *,
    hidden_size: int = CheckpointShape.hidden_size,
    intermediate_size: int = CheckpointShape.intermediate_size,
    num_layers: int = CheckpointShape.num_layers,
    num_heads: int = CheckpointShape.num_heads,
    num_kv_heads: int = CheckpointShape.num_kv_heads,
    head_dim: int = CheckpointShape.head_dim,
    num_experts: int = CheckpointShape.num_experts,
    num_experts_per_tok: int = CheckpointShape.num_experts_per_tok,
    moe_intermediate_size: int = CheckpointShape.moe_intermediate_size,
    vocab_size: int = CheckpointShape.vocab_size,
    max_position_embeddings: int = CheckpointShape.max_position_embeddings,
    tie_word_embeddings: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: int | None = None,
) -> Path:
    """Writes config, weights and tokenizer into folder `out`; equal arguments give equal files.

    Args:
        out: made if missing; must be empty.
        arch: llama, qwen3 or qwen3_moe; the expert sizes matter to the last one only.
        dtype: of the stored weights: float32, bfloat16 or float16.
        max_shard_size: bytes per weight file; None: one file without an index.

    Returns:
        `out`.

    Raises:
        ValueError: naming the argument that is out of bounds.
        FileExistsError: if `out` holds something.
    """
    shape = CheckpointShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        moe_intermediate_size=moe_intermediate_size,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
    )
    shape.validate()
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    if max_shard_size is not None and max_shard_size < 1:
        raise ValueError(f"max_shard_size must be positive, got {max_shard_size}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; choose another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(out, shape)
    _write_configs(out, arch, shape, vocabulary, tie_word_embeddings, dtype)
    weights = _random_weights(out, len(vocabulary), seed, dtype)
    _write_weights(out, weights, max_shard_size)
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baton checkpoint create`."""
    parser.add_argument("--arch", required=True, choices=list(ARCHITECTURES))
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must not exist or be empty")
    sizes = {
        "--hidden-size": "hidden_size",
        "--intermediate-size": "intermediate_size",
        "--layers": "num_layers",
        "--heads": "num_heads",
        "--kv-heads": "num_kv_heads",
        "--head-dim": "head_dim",
        "--experts": "num_experts",
        "--experts-per-token": "num_experts_per_tok",
        "--moe-intermediate-size": "moe_intermediate_size",
        "--vocab-size": "vocab_size",
        "--max-position-embeddings": "max_position_embeddings",
    }
    for flag, field in sizes.items():
        default = getattr(CheckpointShape, field)
        parser.add_argument(flag, dest=field, type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--tie-word-embeddings", action="store_true", help="the output projection is the embedding")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--max-shard-size", type=int, metavar="BYTES", help="split the weights into files of this size")


def run(args: argparse.Namespace) -> int:
    """Makes the checkpoint that parsed `add_arguments` describe; returns the process's exit code."""
    accepted = inspect.signature(create_checkpoint).parameters
    options = {name: value for name, value in vars(args).items() if name in accepted and name not in ("out", "arch")}
    try:
        path = create_checkpoint(args.out, args.arch, **options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{ARCHITECTURES[args.arch]} checkpoint written to {path}")
    return 0


def _write_configs(
    out: Path, arch: str, shape: CheckpointShape, vocabulary: dict[str, int], tie_word_embeddings: bool, dtype: str
) -> None:
    eos_token_ids = [vocabulary[TURN_END], vocabulary[END_OF_TEXT]]
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": vocabulary[TURN_END],
        "pad_token_id": vocabulary[END_OF_TEXT],
        "torch_dtype": dtype,
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
    _write_json(out / "config.json", config)
    generation = {"eos_token_id": eos_token_ids, "pad_token_id": vocabulary[END_OF_TEXT]}
    _write_json(out / "generation_config.json", generation)


def _write_tokenizer(out: Path, shape: CheckpointShape) -> dict[str, int]:
    """Trains a byte-level BPE on the corpus below and writes it; returns its vocabulary, of at most vocab_size tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(out / "tokenizer_config.json", settings)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocabulary


def _random_weights(out: Path, tokenizer_size: int, seed: int, dtype: str) -> dict[str, torch.Tensor]:
    """Every tensor the written config.json asks for."""
    import torch

    from baton_engine.models.config import load_checkpoint_config
    from baton_engine.models.registry import MODELS

    config = load_checkpoint_config(out)
    with torch.device("meta"):
        model = MODELS[config.architecture](config)
    generator = torch.Generator().manual_seed(seed)
    output_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    weights: dict[str, torch.Tensor] = {}
    for name, target in model.weight_targets().items():
        values = torch.randn(target.shape, generator=generator)
        if name == output_name:
            # The final norm makes hidden states of length sqrt(hidden_size): logits get this spread.
            values *= LOGIT_STD / math.sqrt(config.hidden_size)
            # A zero row gives logit 0, far below the best: special tokens and ids without text are hardly ever sampled.
            values[: len(SPECIAL_TOKENS)] = 0
            values[tokenizer_size:] = 0
        elif name.endswith("norm.weight"):
            sharp = name.endswith(("q_norm.weight", "k_norm.weight"))
            values = (2.0 if sharp else 1.0) * (1 + 0.1 * values)
        elif name != "model.embed_tokens.weight":
            # Queries and keys (and routers) get twice the scale: attention then picks out few tokens instead of averaging
            # all of them away, and the next token depends on the whole context instead of cycling.
            sharp = name.endswith(("q_proj.weight", "k_proj.weight", "mlp.gate.weight"))
            values *= (2.0 if sharp else 1.5) / math.sqrt(target.shape[-1])
        weights[name] = values.to(getattr(torch, dtype))
    return weights


def _write_weights(out: Path, weights: dict[str, torch.Tensor], max_shard_size: int | None) -> None:
    from safetensors.torch import save_file

    metadata = {"format": "pt"}  # transformers refuses files without it
    if max_shard_size is None:
        save_file(weights, out / "model.safetensors", metadata=metadata)
        return
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_nbytes = 0
    for name, tensor in weights.items():
        if shards[-1] and shard_nbytes + tensor.nbytes > max_shard_size:
            shards.append({})
            shard_nbytes = 0
        shards[-1][name] = tensor
        shard_nbytes += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata=metadata)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    _write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


# The tokenizer's corpus: sentences drawn from these words, and chained word parts, so that a few thousand merges exist.
_ADJECTIVES = """
quick quiet bright narrow early late gentle heavy simple careful distant silver wooden patient steady open green
"""
_NOUNS = """
runner river window machine letter garden station market bridge question answer harbour teacher engine story forest
mountain kitchen morning winter number language city message reader captain signal
"""
_VERBS = """
carries finds opens follows describes remembers crosses builds measures answers passes returns reads writes keeps
hands watches moves counts learns
"""
_ADVERBS = "slowly often again today never always together carefully almost nearly quickly"
_PHRASES = (
    "What is the capital of that country?",
    "Please explain how it works, step by step.",
    "Write a short story about the sea.",
    "You are a helpful assistant.",
    "The answer is 42, and the sum of 3 and 4 is 7.",
    "Once upon a time there was a small village near the river.",
    "def add(a, b):\n    return a + b\n",
    "I don't know; however, we can't stop here, and it's not the end.",
)
_PREFIXES = "re un over inter trans sub micro auto pre con dis en fore under out"
_STEMS = """
form port act struct press ject scrib mit duc vers tract spect gress lat pos ver fer tain cept grad nect sist plic
rupt loc mov quest cred serv tend vis voc flu jud
"""
_SUFFIXES = "ing ed er ion able ment ly ness ful al ive ity ance"


def _corpus(num_sentences: int = 3000) -> list[str]:
    adjectives, nouns, verbs, adverbs = (words.split() for words in (_ADJECTIVES, _NOUNS, _VERBS, _ADVERBS))
    choose = random.Random(0).choice
    sentences = [
        f"The {choose(adjectives)} {choose(nouns)} {choose(verbs)} the {choose(nouns)} of a {choose(adjectives)} "
        f"{choose(nouns)} {choose(adverbs)}, and it {choose(verbs)} every {choose(nouns)}."
        for _ in range(num_sentences)
    ]
    derived = [
        " ".join(map("".join, itertools.product([prefix], _STEMS.split(), _SUFFIXES.split())))
        for prefix in _PREFIXES.split()
    ]
    return sentences + derived + list(_PHRASES) * 50
