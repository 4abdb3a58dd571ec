"""Measures the perplexity of a small trained model in each precision of its weights.

Rounding does not raise the perplexity of random weights, and no trained weights can be downloaded
here. So the benchmark trains a Llama of 5 million parameters on bytes of Python's standard library,
once. The measured text comes from files that are not in the training set.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from remote import Remote
from tokenizers import Tokenizer

from baton_engine.random_checkpoint import create_checkpoint
from report import Goal

LENGTH = 256
BATCH_SIZE = 16
NUM_STEPS = 400
LEARNING_RATE = 2e-3
NUM_TEST_SEQUENCES = 64
#: Precision -> (options of `LLM`, maximum increase of the perplexity over float32's in percent).
PRECISIONS: dict[str, tuple[dict[str, str], float | None]] = {
    "float32": ({"dtype": "float32"}, None),
    "bfloat16": ({"dtype": "bfloat16"}, None),
    "int8": ({"dtype": "bfloat16", "quantization": "int8"}, 0.5),
    "int4": ({"dtype": "bfloat16", "quantization": "int4"}, 3.0),
}


def trained_checkpoint(folder: Path) -> Path:
    """Return the trained model. Train it first if necessary, which takes about five minutes."""
    done = folder / ".trained"
    if done.exists():
        return folder
    if not (folder / "config.json").exists():
        create_checkpoint(
            folder,
            "llama",
            hidden_size=256,
            intermediate_size=768,
            num_layers=6,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            vocab_size=259,  # bytes and special tokens, without merges
            max_position_embeddings=LENGTH,
        )
    _train(folder)
    done.touch()
    return folder


def _train(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    tokens = torch.tensor(_tokens(folder, training=True))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, NUM_STEPS)
    for step in range(NUM_STEPS):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH_SIZE,)).tolist()
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"  training step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


def _tokens(folder: Path, *, training: bool) -> list[int]:
    """Return the tokens of every ninth file of the standard library, or of the training files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [
        file.read_text(encoding="utf-8", errors="ignore")
        for number, file in enumerate(files)
        if (number % 9 > 0) == training
    ]
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("\n".join(texts))
    return list(encoding.ids)


class Perplexity:
    """Baton in one precision, in its own process."""

    def __init__(self, path: Path, **options: str) -> None:
        from baton_engine import LLM

        self._llm = LLM(str(path), max_model_len=LENGTH, **options)

    def of(self, prompts: list[list[int]]) -> float:
        """Return the perplexity per token of the prompts. Each prompt is a separate sequence."""
        from baton_engine import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        results = self._llm.generate(prompts, params, use_tqdm=False)
        logprobs = [
            entry[token].logprob
            for prompt, result in zip(prompts, results, strict=True)
            for token, entry in zip(prompt, result.prompt_logprobs, strict=True)
            if entry is not None
        ]
        return math.exp(-sum(logprobs) / len(logprobs))


def measure(path: Path) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Measure the perplexity in each precision."""
    tokens = _tokens(path, training=False)
    stride = len(tokens) // NUM_TEST_SEQUENCES
    starts = range(0, stride * NUM_TEST_SEQUENCES, stride)
    prompts = [tokens[start : start + LENGTH - 1] for start in starts]
    found: dict[str, float] = {}
    for precision, (options, _) in PRECISIONS.items():
        engine = Remote(Perplexity, path, **options)
        found[precision] = engine.call("of", prompts)
        engine.close()
    rows = [
        {
            "part": "perplexity per byte",
            "way": precision,
            "perplexity": round(value, 4),
            "above float32, %": round(100 * (value / found["float32"] - 1), 2),
        }
        for precision, value in found.items()
    ]
    goals = [
        Goal(
            f"perplexity of {precision} above float32's",
            100 * (found[precision] / found["float32"] - 1),
            goal,
            "%",
            at_most=True,
        )
        for precision, (_, goal) in PRECISIONS.items()
        if goal is not None
    ]
    return rows, goals
