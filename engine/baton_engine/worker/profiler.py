"""torch's profiler around any number of steps: what ran, how long, in a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from baton_protocol.config import container_path


class Profiler:
    """Sees what the thread that calls `start` runs, and the GPU. One per worker.

    Args:
        directory: where traces go, as the container sees it; empty: profiling is refused.
        rank: of the worker among all of the engine; part of the traces' names.
    """

    def __init__(self, directory: str, rank: int, device: torch.device) -> None:
        self._directory = directory
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None

    def start(self) -> None:
        """Raises ValueError if no directory is configured, RuntimeError if it runs already."""
        if not self._directory:
            raise ValueError(
                "profiling is off: set observability.profiler_dir to the folder where traces shall go"
            )
        if self._running is not None:
            raise RuntimeError("the profiler runs already; stop it first")
        started = profile(activities=self._activities)
        started.start()
        self._running = started

    def stop(self) -> Path:
        """Writes the trace and returns its file. Raises RuntimeError if the profiler does not run."""
        if self._running is None:
            raise RuntimeError("the profiler does not run; start it first")
        stopped, self._running = self._running, None
        stopped.stop()
        folder = container_path(self._directory)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"baton-rank{self._rank}-{os.getpid()}-{time.time_ns()}.pt.trace.json.gz"
        stopped.export_chrome_trace(str(file))
        return file
