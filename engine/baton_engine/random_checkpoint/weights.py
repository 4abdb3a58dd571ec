"""Creates random weights and writes the weight files of a checkpoint.

The weights are scaled so that the generated text depends on the prompt.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from baton_engine.random_checkpoint.tokenizer_files import SPECIAL_TOKENS
from baton_protocol.pooling_params import Task

if TYPE_CHECKING:
    import torch

#: Standard deviation of the logits. Between the two highest of n normal values, the median gap is
#: about 0.7 * std / sqrt(2 ln n), here 0.5.
LOGIT_STD = 3.0


def random_weights(
    out: Path, tokenizer_size: int, seed: int, dtype: str
) -> dict[str, torch.Tensor]:
    """Return random weights for the model that config.json in `out` describes, by tensor name.

    Args:
        out: folder of the checkpoint. It already has config.json.
        tokenizer_size: number of tokens in the tokenizer's vocabulary. Ids from this number on have
            no text, and the model rarely samples them.
        seed: equal seeds give equal weights.
        dtype: name of a torch dtype, such as "bfloat16".
    """
    import torch

    from baton_engine.models.checkpoint.checkpoint_config import load_checkpoint_config
    from baton_engine.models.factory import make_model

    config = load_checkpoint_config(out)
    model = make_model(config)
    generator = torch.Generator().manual_seed(seed)
    output_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    weights: dict[str, torch.Tensor] = {}
    for name, target in model.weight_targets().items():
        values = torch.randn(target.shape, generator=generator)
        if name == output_name:
            # The final norm gives hidden states the length sqrt(hidden_size), so logits have
            # this spread.
            values *= LOGIT_STD / math.sqrt(config.hidden_size)
            # A zero row gives logit 0, far below the best logit. Special tokens and ids without
            # text are therefore hardly ever sampled.
            values[: len(SPECIAL_TOKENS)] = 0
            values[tokenizer_size:] = 0
        elif name.endswith(("norm.weight", "LayerNorm.weight")):
            sharp = name.endswith(("q_norm.weight", "k_norm.weight"))
            values = (2.0 if sharp else 1.0) * (1 + 0.1 * values)
        elif name.endswith(".bias"):
            values *= 0.5
        elif name != "model.embed_tokens.weight":
            # A larger scale of queries, keys and routers lets attention select few tokens instead
            # of averaging all. The next token then depends on the whole context.
            sharp = name.endswith(
                ("q_proj.weight", "k_proj.weight", "mlp.gate.weight", "moe.gate.weight")
            )
            values *= (2.0 if sharp else 1.5) / math.sqrt(target.shape[-1])
        if config.pooling is not None and config.pooling.task is Task.EMBED:
            # An embedding model has no output layer, so its tensor names have no prefix.
            name = name.removeprefix(model.NAME_PREFIX)
        weights[name] = values.to(getattr(torch, dtype))
    return weights


def write_weights(out: Path, weights: dict[str, torch.Tensor], max_shard_size: int | None) -> None:
    """Write the weights to safetensors files in `out`.

    The files are readable by all users, so that a pod can run as any user.

    Args:
        out: folder of the checkpoint.
        weights: tensors by name.
        max_shard_size: maximum bytes per file, except for a file with a single larger tensor. None:
            one file without an index.
    """
    from safetensors.torch import save_file

    metadata = {"format": "pt"}  # transformers refuses files without it

    def save(tensors: dict[str, torch.Tensor], file: str) -> None:
        save_file(tensors, out / file, metadata=metadata)
        (out / file).chmod(0o644)

    if max_shard_size is None:
        save(weights, "model.safetensors")
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
        save(shard, file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
