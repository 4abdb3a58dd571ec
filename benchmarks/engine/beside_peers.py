"""Measures Baton beside other engines, with the same checkpoint, prompts and lengths."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import embeddings
import perplexity
import serving
from peers.candidate import Candidate
from peers.installation import Installation
from workload import VOCAB_SIZE, checkpoint, moe_checkpoint, sample

from report import Goal

Rows = list[dict[str, Any]]
NUM_THREADS = os.cpu_count() or 1
PROMPT_LEN = 32
PREFILL_LEN = 960
BATCH_SIZES = (1, 4, 8)
THROUGHPUT = "throughput"
PREFILL = "prefill"
AGREEMENT = "first tokens as Baton's, %"
#: Precision -> (Baton's options, GGUF type, OpenVINO weights, OpenVINO inference precision, run
#: vLLM). An empty inference precision is OpenVINO's default.
PRECISIONS: dict[str, tuple[dict[str, str], str, str, str, bool]] = {
    "float32": ({"dtype": "float32"}, "F32", "fp32", "f32", True),
    "bfloat16": ({"dtype": "bfloat16"}, "BF16", "fp32", "bf16", True),
    "int8": ({"dtype": "bfloat16", "quantization": "int8"}, "Q8_0", "int8", "", False),
    "int4": ({"dtype": "bfloat16", "quantization": "int4"}, "Q4_K_M", "int4", "", False),
}
#: llama.cpp with int4 weights in Baton's format: one scale for 32 weights.
LLAMA_CPP_Q4_0 = "llama.cpp, Q4_0"
#: Name -> cores of vLLM's compute threads. The default leaves one core to the scheduler.
VLLM_THREADS = {"vLLM, default": "auto", "vLLM, all cores": f"0-{NUM_THREADS - 1}"}


class Measurement:
    """Tokens per second in one precision, for each candidate, figure and repeat."""

    def __init__(self, candidates: dict[str, Candidate]) -> None:
        self._candidates = candidates
        self._rates: dict[tuple[str, str], list[float]] = {}
        self._rng = random.Random(1)

    def decode(self, batch_size: int, num_tokens: int) -> None:
        """Measure the decode rate of a batch, in one repeat.

        The difference of two lengths excludes the prefill and the cost of a call.
        """
        prompts = self._prompts(batch_size, PROMPT_LEN)
        for name, candidate in self._in_turn():
            # Warm up after the suspension.
            candidate.generate([(prompt, 2) for prompt in prompts])
            short, long = (
                candidate.generate([(prompt, 2 + n) for prompt in prompts]).seconds
                for n in (0, num_tokens)
            )
            self._add(name, decode_figure(batch_size), batch_size * num_tokens / (long - short))

    def prefill(self) -> None:
        """Measure the prefill rate of one prompt, in one repeat."""
        works = [(prompt, 1) for prompt in self._prompts(1, PREFILL_LEN)]
        for name, candidate in self._in_turn():
            self._add(name, PREFILL, PREFILL_LEN / candidate.generate(works).seconds)

    def throughput(self, scale: float) -> None:
        """Measure the output tokens per second of the sample, in one repeat."""
        works = [(work.prompt, work.num_output_tokens) for work in sample(scale=scale)]
        num_tokens = sum(num_output_tokens for _, num_output_tokens in works)
        for name, candidate in self._in_turn():
            self._add(name, THROUGHPUT, num_tokens / candidate.generate(works).seconds)

    def agreement(self) -> dict[str, int]:
        """Return each candidate's percentage of prompts with the same first token as Baton."""
        works = [(prompt, 1) for prompt in self._prompts(64, PROMPT_LEN)]
        tokens = {
            name: candidate.generate(works).result for name, candidate in self._candidates.items()
        }
        pairs = {name: zip(own, tokens["Baton"], strict=True) for name, own in tokens.items()}
        return {name: 100 * sum(a == b for a, b in pairs[name]) // len(works) for name in pairs}

    def ratio(self, figure: str) -> float:
        """Return Baton's rate divided by the fastest peer's, as the median over repeats."""
        ours = self._rates["Baton", figure]
        return min(
            median(our / their for our, their in zip(ours, theirs, strict=True))
            for (name, measured), theirs in self._rates.items()
            if measured == figure and name != "Baton"
        )

    def rows(self, part: str, agreement: dict[str, int]) -> Rows:
        """Return a row of rates for each candidate and repeat.

        Args:
            part: name of the rows' part.
            agreement: result of `agreement`.
        """
        rows: Rows = []
        for name, percent in agreement.items():
            figures = [figure for candidate, figure in self._rates if candidate == name]
            for rates in zip(*(self._rates[name, figure] for figure in figures), strict=True):
                rounded = (round(rate, 1) for rate in rates)
                repeat = dict(zip(figures, rounded, strict=True))
                rows.append({"part": part, "way": name} | repeat | {AGREEMENT: percent})
        return rows

    def _prompts(self, num_prompts: int, length: int) -> list[list[int]]:
        return [
            [self._rng.randrange(300, VOCAB_SIZE) for _ in range(length)]
            for _ in range(num_prompts)
        ]

    def _in_turn(self) -> list[tuple[str, Candidate]]:
        """Return the candidates in an order that the next call reverses."""
        self._candidates = dict(reversed(self._candidates.items()))
        return list(self._candidates.items())

    def _add(self, name: str, figure: str, rate: float) -> None:
        self._rates.setdefault((name, figure), []).append(rate)
        print(f"  {name}, {figure}: {rate:.1f} tokens/s", flush=True)


def decode_figure(batch_size: int) -> str:
    """Return the name of a decode rate."""
    return f"decode of {batch_size}"


@contextmanager
def loaded(
    precision: str, model: Path, peers: Installation, *, only: tuple[str, ...] = ()
) -> Iterator[dict[str, Candidate]]:
    """Load Baton and its peers.

    Args:
        precision: key of PRECISIONS.
        model: the checkpoint.
        peers: the peers' environments.
        only: names of the peers to load; empty: all.
    """
    options, kind, weights, hint, has_vllm = PRECISIONS[precision]
    ours = Path(sys.executable)
    candidates: dict[str, Candidate] = {}

    def add(name: str, python: Path, module: str, **arguments: Any) -> None:
        environment = arguments.pop("environment", {})
        log = peers.logs / f"{name}.log"
        candidates[name] = Candidate(python, module, log, environment, **arguments)

    try:
        add(
            "Baton",
            ours,
            "baton",
            model=str(model),
            max_num_seqs=64,
            kv_cache_memory_bytes=2 * 2**30,
            **options,
        )
        kinds = {"llama.cpp": kind} | ({LLAMA_CPP_Q4_0: "Q4_0"} if precision == "int4" else {})
        for name, one_kind in kinds.items():
            if not only or name in only:
                file, server = peers.gguf(model, one_kind), peers.llama_cpp("llama-server")
                arguments = {"server": str(server), "model": str(file), "num_threads": NUM_THREADS}
                add(name, ours, "llama_cpp", **arguments)
        if not only or "OpenVINO" in only:
            folder = str(peers.openvino(model, weights))
            arguments = {"model": folder, "precision": hint, "num_threads": NUM_THREADS}
            add("OpenVINO", peers.python("openvino"), "openvino_cpu", **arguments)
        if has_vllm and not only:
            for name, cores in VLLM_THREADS.items():
                environment = {
                    "VLLM_CPU_KVCACHE_SPACE": "2",
                    "VLLM_CPU_OMP_THREADS_BIND": cores,
                }
                arguments = {"model": str(model), "dtype": precision, "environment": environment}
                add(name, peers.python("vllm"), "vllm_cpu", **arguments)
        yield candidates
    finally:
        for candidate in candidates.values():
            candidate.close()


def precisions(peers: Installation, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure decode, prefill and throughput in each precision."""
    model = checkpoint(peers.checkpoints / "llama")
    rows: Rows = []
    goals: list[Goal] = []
    for precision in PRECISIONS:
        with loaded(precision, model, peers) as candidates:
            measurement = Measurement(candidates)
            agreement = measurement.agreement()  # also warms up the candidates
            has_throughput = precision in ("float32", "bfloat16")
            for _ in range(repeats):
                for batch_size in BATCH_SIZES:
                    measurement.decode(batch_size, max(32, int(128 * scale)))
                measurement.prefill()
                if has_throughput:
                    measurement.throughput(scale)
            rows += measurement.rows(f"tokens/s in {precision}", agreement)
            wanted = {decode_figure(size): 1.0 if size == 1 else 1.1 for size in BATCH_SIZES}
            if has_throughput:
                wanted |= {PREFILL: 1.0, THROUGHPUT: 1.15}
            goals += [
                Goal(
                    f"{figure} in {precision} against the fastest peer",
                    measurement.ratio(figure),
                    goal,
                    "x",
                )
                for figure, goal in wanted.items()
            ]
    return rows, goals


def moe(peers: Installation, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure decode of a mixture of experts against llama.cpp, in bfloat16."""
    model = moe_checkpoint(peers.checkpoints / "moe")
    with loaded("bfloat16", model, peers, only=("llama.cpp",)) as candidates:
        measurement = Measurement(candidates)
        agreement = measurement.agreement()
        for _ in range(repeats):
            for batch_size in BATCH_SIZES:
                measurement.decode(batch_size, max(32, int(128 * scale)))
        rows = measurement.rows("tokens/s of a mixture of experts in bfloat16", agreement)
        goal = Goal(
            "decode of 1 in a mixture of experts against llama.cpp",
            measurement.ratio(decode_figure(1)),
            1.0,
            "x",
        )
    return rows, [goal]


def perplexities(peers: Installation, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure the perplexity of a small trained model with rounded weights."""
    return perplexity.measure(perplexity.trained_checkpoint(peers.checkpoints / "trained"))


PARTS = {
    "peers": precisions,
    "peers-moe": moe,
    "perplexity": perplexities,
    "serving": serving.measure,
    "embeddings": embeddings.measure,
}
