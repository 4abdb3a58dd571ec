"""The traces that the profiler of a worker writes."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path

import msgspec
import pytest

from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.options.config import ObservabilityConfig
from support.engine.step_driver import Request, StepDriver, random_prompt, runner_config


def test_a_profile_is_a_trace_file_named_after_the_rank(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    observability = ObservabilityConfig(profiler_dir=str(folder))
    runner = ModelRunner(
        msgspec.structs.replace(runner_config(checkpoint), observability=observability)
    )
    runner.load_model()
    runner.allocate_kv_cache(64)
    with pytest.raises(RuntimeError, match="start it first"):
        runner.stop_profile()
    runner.start_profile()
    with pytest.raises(RuntimeError, match="stop it first"):
        runner.start_profile()
    StepDriver(runner, 64).run([Request("request", random_prompt(40, seed=1), 8)])
    file = runner.stop_profile()
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
    with pytest.raises(ValueError, match=r"observability\.profiler_dir"):
        ModelRunner(runner_config(checkpoint)).start_profile()
