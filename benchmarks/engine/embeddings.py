"""Measures embeddings of 64 texts by Baton and sentence-transformers, in float32 on one CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.candidate import Candidate
from peers.installation import Installation
from torch.nn.functional import cosine_similarity
from workload import VOCAB_SIZE, num_parameters, sample

from baton_engine.random_checkpoint import create_checkpoint
from report import Goal

Rows = list[dict[str, Any]]
OURS, PEER = "Baton", "sentence-transformers"
MAX_MODEL_LEN = 512
NUM_THREADS = os.cpu_count() or 1
#: Model -> arguments of `create_checkpoint`. The models have 110 and 150 million parameters.
MODELS: dict[str, dict[str, Any]] = {
    "bert": {
        "pooling": "mean",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_layers": 12,
        "num_heads": 12,
        "vocab_size": VOCAB_SIZE,
    },
    "qwen3": {"pooling": "last", "size": "150m"},
}


def measure(peers: Installation, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure a batch of 64 texts against `SentenceTransformer.encode`, and compare the results."""
    rows: Rows = []
    goals: list[Goal] = []
    for arch in MODELS:
        model_rows, model_goals = _measure(arch, peers, repeats, scale)
        rows += model_rows
        goals += model_goals
    return rows, goals


def _measure(arch: str, peers: Installation, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    model = peers.checkpoints / f"{arch}-embeddings"
    if not (model / "config.json").exists():
        create_checkpoint(model, arch, max_position_embeddings=MAX_MODEL_LEN, **MODELS[arch])
    prompts = [work.prompt for work in sample(scale=scale)]
    num_tokens = sum(map(len, prompts))
    num_flops = 2 * num_parameters(model)[1] * num_tokens
    with _loaded(model, peers) as candidates:
        ours, theirs = (
            torch.tensor(candidates[name].embed(prompts).result, dtype=torch.float64)
            for name in (OURS, PEER)
        )
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(repeats):
            candidates = dict(reversed(candidates.items()))
            for name, candidate in candidates.items():
                candidate.embed(prompts[:4])  # warms up after the suspension
                seconds[name].append(candidate.embed(prompts).seconds)
                print(f"  {arch}, {name}: {seconds[name][-1]:.2f} s", flush=True)
    rows: Rows = [
        {
            "part": "embeddings of 64 texts",
            "model": arch,
            "way": name,
            "seconds": round(each, 3),
            "tokens_per_s": round(num_tokens / each, 1),
            "weight_gflop_per_s": round(num_flops / each / 1e9, 1),
        }
        for name in (OURS, PEER)
        for each in seconds[name]
    ]
    pairs = zip(seconds[PEER], seconds[OURS], strict=True)
    cosine = cosine_similarity(ours, theirs, dim=1).min().item()
    return rows, [
        Goal(
            f"embeddings of {arch} against {PEER}",
            median(theirs / ours for theirs, ours in pairs),
            1.0,
            "x",
        ),
        Goal(
            f"1 - cosine of embeddings of {arch} with those of {PEER}, highest",
            1e6 * (1 - cosine),
            100.0,
            "millionths",
            at_most=True,
        ),
    ]


@contextmanager
def _loaded(model: Path, peers: Installation) -> Iterator[dict[str, Candidate]]:
    """Load the model in both engines."""
    common: dict[str, Any] = {"model": str(model), "num_threads": NUM_THREADS}
    options = {"dtype": "float32", "max_num_seqs": 64, "max_model_len": MAX_MODEL_LEN}
    python = peers.python(PEER)
    candidates: dict[str, Candidate] = {}
    try:
        candidates[OURS] = Candidate(
            Path(sys.executable), "baton", peers.logs / f"{OURS}.log", {}, **common, **options
        )
        candidates[PEER] = Candidate(
            python, "sentence_transformers_cpu", peers.logs / f"{PEER}.log", {}, **common
        )
        yield candidates
    finally:
        for candidate in candidates.values():
            candidate.close()
