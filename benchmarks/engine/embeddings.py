"""Embeddings of a batch of 64 texts: Baton beside sentence-transformers on the same CPU.

    PYTHONPATH=benchmarks python benchmarks/engine/embeddings.py --threads 2

The models have random weights in float32: BERT and Qwen3 with about 110 and 150 million parameters.
Lengths are lognormal, as in `workload.py`. Both sides get token ids, so tokenizers do not count.
Without sentence-transformers, its loop is run with transformers: batches of 32, sorted by length,
padded to the longest. In the same run, the embeddings of both sides are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from workload import VOCAB_SIZE, sample

from baton_engine import LLM
from baton_engine.checkpoint import create_checkpoint

NUM_TEXTS = 64
PEER_BATCH = 32  # the default of sentence-transformers
#: Shape and pooling of each model.
MODELS: dict[str, dict[str, Any]] = {
    "bert": {
        "arch": "bert",
        "pooling": "mean",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_layers": 12,
        "num_heads": 12,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
    },
    "qwen3": {
        "arch": "qwen3",
        "pooling": "last",
        "size": "150m",
        "max_position_embeddings": 1024,
    },
}


class Peer:
    """The model of sentence-transformers, or its loop with transformers."""

    def __init__(self, path: Path, pooling: str) -> None:
        from transformers import AutoModel

        self.name = "transformers"
        self._pooling = pooling
        if importlib.util.find_spec("sentence_transformers") is None:
            self._model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        else:
            from sentence_transformers import SentenceTransformer

            self.name = "sentence-transformers"
            self._model = SentenceTransformer(str(path), device="cpu")

    @torch.inference_mode()
    def embed(self, prompts: list[list[int]]) -> Tensor:
        """Return the embeddings [len(prompts), hidden_size]."""
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        parts = [
            self._batch([prompts[index] for index in order[start : start + PEER_BATCH]])
            for start in range(0, len(order), PEER_BATCH)
        ]
        result = torch.cat(parts)
        return result[torch.tensor(order).argsort()]

    def _batch(self, prompts: list[list[int]]) -> Tensor:
        width = max(map(len, prompts))
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        features = {"input_ids": input_ids, "attention_mask": mask}
        if self.name == "sentence-transformers":
            embedding: Tensor = self._model(features)["sentence_embedding"]
            return embedding
        hidden = self._model(**features).last_hidden_state
        if self._pooling == "last":
            pooled = hidden[torch.arange(len(prompts)), mask.sum(1) - 1]
        else:
            pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return normalize(pooled, dim=1)


def measure(name: str, folder: Path, threads: int, runs: int) -> dict[str, Any]:
    """Return the times of both sides in seconds, and the lowest cosine of their embeddings."""
    shape = MODELS[name]
    path = create_checkpoint(folder / name, **shape)
    longest = shape["max_position_embeddings"]
    prompts = [work.prompt[:longest] for work in sample(NUM_TEXTS)]
    peer = Peer(path, shape["pooling"])
    args: dict[str, Any] = {"dtype": "float32", "num_threads": threads, "max_num_seqs": NUM_TEXTS}
    with LLM(path, enable_prefix_caching=False, **args) as llm:

        def embed() -> Tensor:
            outputs = llm.embed(prompts, use_tqdm=False)
            return torch.tensor([output.outputs.embedding for output in outputs])

        sides: dict[str, Callable[[], Tensor]] = {
            "baton": embed,
            peer.name: lambda: peer.embed(prompts),
        }
        embeddings = [run() for run in sides.values()]  # also warms up
        lowest = cosine_similarity(*embeddings, dim=1).min().item()
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(runs):  # alternate, so that both sides meet the same noise
            for side, run in sides.items():
                started = time.perf_counter()
                run()
                times[side].append(time.perf_counter() - started)
    medians = {side: statistics.median(each) for side, each in times.items()}
    return {
        "model": name,
        "texts": NUM_TEXTS,
        "tokens": sum(map(len, prompts)),
        "lowest_cosine": lowest,
        "seconds": medians,
        "speedup": medians[peer.name] / medians["baton"],
    }


def main() -> int:
    """Print one line of JSON per model. Return 1 if embeddings differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument("--runs", type=int, default=5, help="runs of each side")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        for name in args.model or MODELS:
            result = measure(name, Path(folder), args.threads, args.runs)
            wrong |= result["lowest_cosine"] < 0.9999
            print(json.dumps(result), flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
