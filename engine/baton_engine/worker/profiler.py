"""Records steps with torch's profiler. Open the traces in chrome://tracing or Perfetto."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from baton_protocol.options.config import container_path


class Profiler:
    """The profiler of a worker. It records the thread that calls `start`, and the GPU."""

    def __init__(self, directory: str, rank: int, device: torch.device) -> None:
        """Create a profiler that does not record.

        Args:
            directory: path of the trace folder in the container. Empty: `start` raises ValueError.
            rank: rank of the worker in the engine. The file name of a trace contains the rank.
            device: device of the worker.
        """
        self._directory = directory
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None

    def start(self) -> None:
        """Start recording.

        Raises:
            ValueError: observability.profiler_dir is not configured.
            RuntimeError: the profiler is already running.
        """
        if not self._directory:
            raise ValueError(
                "profiling is off: set observability.profiler_dir to the folder of the traces"
            )
        if self._running is not None:
            raise RuntimeError("the profiler is running already; stop it first")
        started = profile(activities=self._activities)
        started.start()
        self._running = started

    def stop(self) -> Path:
        """Stop recording, write the trace and return its path.

        Raises:
            RuntimeError: the profiler is not running.
        """
        if self._running is None:
            raise RuntimeError("the profiler is not running; start it first")
        stopped, self._running = self._running, None
        stopped.stop()
        folder = container_path(self._directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"baton-{socket.gethostname()}-rank{self._rank}-{os.getpid()}-{time.time_ns()}"
        file = folder / f"{name}.pt.trace.json.gz"
        stopped.export_chrome_trace(str(file))
        return file
