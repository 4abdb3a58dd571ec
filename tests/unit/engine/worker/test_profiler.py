"""The traces that the profiler of a worker writes."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path

import msgspec
import pytest

from baton_engine.worker.worker import Worker
from baton_protocol.options.config import ObservabilityConfig
from support.engine.step_driver import (
    NUM_SWAP_BLOCKS,
    Request,
    StepDriver,
    random_prompt,
    runner_config,
)


def test_a_profile_is_a_trace_file_named_after_the_rank(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    observability = ObservabilityConfig(profiler_dir=str(folder))
    worker = Worker(
        msgspec.structs.replace(runner_config(checkpoint), observability=observability), "instance"
    )
    worker.load_model()
    worker.initialize_cache(64, NUM_SWAP_BLOCKS)
    with pytest.raises(RuntimeError, match="start it first"):
        worker.stop_profile()
    worker.start_profile()
    with pytest.raises(RuntimeError, match="stop it first"):
        worker.start_profile()
    StepDriver(worker, 64).run([Request("request", random_prompt(40, seed=1), 8)])
    file = worker.stop_profile()
    assert file.parent == folder
    assert file.name.startswith(f"baton-{socket.gethostname()}-rank0-")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(
        "paged_attention" in str(e.get("name"))
        or "softmax" in str(e.get("name"))
        or "scaled_dot" in str(e.get("name"))
        for e in events
    )


def test_profiling_without_profiler_dir_is_refused(checkpoint: Path) -> None:
    worker = Worker(runner_config(checkpoint), "instance")
    worker.load_model()
    with pytest.raises(ValueError, match=r"observability\.profiler_dir"):
        worker.start_profile()
