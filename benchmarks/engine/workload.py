"""The workload of the engine benchmarks: 64 requests with lognormal lengths, and a checkpoint."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from baton_engine.random_checkpoint import SIZES, create_checkpoint

SIZE = "150m"
VOCAB_SIZE = SIZES[SIZE].vocab_size
MAX_MODEL_LEN = 1024
SEED = 20


@dataclass(frozen=True)
class Work:
    """One request: a prompt of random tokens, and the number of tokens to generate."""

    prompt: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output_tokens


def sample(num_requests: int = 64, *, scale: float = 1.0) -> list[Work]:
    """Return the sample, which depends on the arguments only.

    Prompts have a median of 128 tokens (sigma 0.7), outputs 96 (sigma 0.9), each at most 512.

    Args:
        num_requests: number of requests.
        scale: factor of all lengths, for quick runs.
    """
    rng = random.Random(SEED)

    def length(median: float, sigma: float) -> int:
        return max(1, round(min(512, median * rng.lognormvariate(0, sigma)) * scale))

    works = []
    for _ in range(num_requests):
        prompt_len, output_len = length(128, 0.7), length(96, 0.9)
        works.append(Work([rng.randrange(300, VOCAB_SIZE) for _ in range(prompt_len)], output_len))
    return works


def checkpoint(folder: Path) -> Path:
    """Return a Llama model with about 150 million random weights. Creates it if necessary."""
    if not (folder / "config.json").exists():
        create_checkpoint(folder, "llama", size=SIZE, max_position_embeddings=MAX_MODEL_LEN)
    return folder


def moe_checkpoint(folder: Path) -> Path:
    """Return a Qwen3-MoE model with 32 experts, 4 per token. Creates it if necessary.

    It has about 500 million random weights, of which a token reads 120 million.
    """
    if not (folder / "config.json").exists():
        create_checkpoint(
            folder,
            "qwen3_moe",
            size=SIZE,
            num_experts=32,
            num_experts_per_tok=4,
            max_position_embeddings=MAX_MODEL_LEN,
        )
    return folder


def num_parameters(path: Path) -> tuple[int, int]:
    """Return the number of all parameters, and the number of parameters that every token reads.

    A token reads one row of each embedding table and all other parameters.
    """
    from baton_engine.models.checkpoint.loader import read_tensor_index

    total = read = 0
    for name, entry in read_tensor_index(path).items():
        size = 1
        for dim in entry.shape:
            size *= dim
        total += size
        if "embed" not in name:
            read += size
    return total, read
