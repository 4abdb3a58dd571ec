"""The engine benchmark: its parts that need no model, what it records, and its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OCCUPANCY = """
import json, memory, workload
works = workload.sample(scale=0.1)
runs = [memory.occupancy(works, 512, way) for way in (memory.PAGED, memory.RESERVED)]
print(json.dumps([run["waste_percent"] for run in runs]))
"""
#: Two repeats with fake engines that take the given seconds.
REPEATS = """
import contextlib, io, json
from beside_peers import Measurement
from peers.candidate import Run

class Fake:
    def __init__(self, *seconds):
        self.seconds = iter(seconds)

    def generate(self, works):
        return Run(next(self.seconds), [[7]])

measurement = Measurement({"Baton": Fake(1.0, 2.0), "vLLM, default": Fake(4.0, 3.0)})
with contextlib.redirect_stdout(io.StringIO()):
    measurement.prefill()
    measurement.prefill()
print(json.dumps(measurement.rows("tokens/s", {"Baton": 100, "vLLM, default": 50})))
"""
#: Fake servers. One number is the throughput and all latencies of a server.
SERVERS = """
import contextlib, io, json, serving

class Fake:
    start_s = 3.0

    def __init__(self, number):
        self.number = number

    def measure(self, *arguments):
        keys = "output_throughput mean_ttft_ms p99_ttft_ms mean_tpot_ms p99_itl_ms"
        return dict.fromkeys(keys.split(), self.number)

class Peers:
    from pathlib import Path
    checkpoints = Path()

    def python(self, environment):
        return environment

@contextlib.contextmanager
def servers(model, peers):
    yield {serving.BATON: Fake(10.0), serving.BATON_TARGET: Fake(12.0),
           serving.VLLM: Fake(4.0), serving.VLLM_ALL_CORES: Fake(6.0)}

serving._servers, serving.checkpoint = servers, lambda folder: folder
with contextlib.redirect_stdout(io.StringIO()):
    rows, goals = serving.measure(Peers(), 2, 0.1)
print(json.dumps([rows, {goal.name: goal.value for goal in goals}]))
"""
#: Fake engines whose runs take 2 s and 5 s. Their embeddings of a prompt are equal.
EMBEDDINGS = """
import contextlib, io, json, tempfile
from pathlib import Path
import embeddings
from peers.candidate import Run

class Fake:
    def __init__(self, seconds):
        self.seconds = seconds

    def embed(self, prompts):
        return Run(self.seconds, [[1.0, float(len(prompt))] for prompt in prompts])

@contextlib.contextmanager
def loaded(model, peers):
    yield {embeddings.OURS: Fake(2.0), embeddings.PEER: Fake(5.0)}

class Peers:
    checkpoints = Path(tempfile.mkdtemp())

shape = {"pooling": "mean", "hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
embeddings._loaded, embeddings.MODELS = loaded, {"bert": {**shape, "num_heads": 2}}
with contextlib.redirect_stdout(io.StringIO()):
    rows, goals = embeddings.measure(Peers(), 2, 0.1)
print(json.dumps([rows, {goal.name: [goal.value, goal.met] for goal in goals}]))
"""


def output_of(script: str) -> Any:
    folders = [str(BENCHMARKS / "engine"), str(BENCHMARKS), *sys.path]
    process = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(process.stdout)


def test_requests_with_reserved_memory_waste_more_of_it_than_paged_ones() -> None:
    paged, reserved = output_of(OCCUPANCY)
    assert 0 < paged < reserved < 100


def test_each_repeat_of_each_engine_is_recorded() -> None:
    agreement = "first tokens as Baton's, %"
    assert output_of(REPEATS) == [
        {"part": "tokens/s", "way": "Baton", "prefill": 960.0, agreement: 100},
        {"part": "tokens/s", "way": "Baton", "prefill": 480.0, agreement: 100},
        {"part": "tokens/s", "way": "vLLM, default", "prefill": 240.0, agreement: 50},
        {"part": "tokens/s", "way": "vLLM, default", "prefill": 320.0, agreement: 50},
    ]


def test_servers_have_a_row_per_repeat_and_goals_against_both_kinds_of_vllm() -> None:
    rows, goals = output_of(SERVERS)
    main_load = [row for row in rows if row["part"] == "serving, 16 at once"]
    assert [row["tokens/s"] for row in main_load] == [10, 10, 12, 12, 4, 4, 6, 6]
    where = "serving 16 at once: output tokens/s against"
    assert goals[f"{where} vllm serve's default"] == 3
    assert goals[f"{where} vllm serve with all cores"] == 2


def test_embeddings_have_a_row_per_repeat_and_goals_for_time_and_cosine() -> None:
    rows, goals = output_of(EMBEDDINGS)
    assert [(row["way"], row["seconds"]) for row in rows] == [
        ("Baton", 2.0),
        ("Baton", 2.0),
        ("sentence-transformers", 5.0),
        ("sentence-transformers", 5.0),
    ]
    (speedup, is_faster), (difference, is_equal) = goals.values()
    assert (speedup, is_faster, is_equal) == (2.5, True, True)
    assert difference == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "serving"], "serving needs --peers"),
        (["--peers", "--part", "decode"], "decode is not measured with --peers"),
    ],
)
def test_a_part_is_refused_with_the_option_that_it_does_not_fit(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    process = subprocess.run(
        [sys.executable, BENCHMARKS / "engine" / "bench.py", *arguments],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]), "HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert process.returncode == 2
    assert message in process.stderr
