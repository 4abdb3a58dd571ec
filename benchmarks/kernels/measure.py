"""Measures time per call and the device's limits, and checks results, for all kernel benchmarks.

Successive calls use different buffers, so that the data is not in the device's cache. On a GPU the
calls are captured into one CUDA graph, and CUDA events time the graph's replays. The time of short
kernels then does not include launches. On a CPU, perf_counter is the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from report import Goal

Rows = list[dict[str, Any]]
Result = tuple[Rows, list[Goal]]
Call = Callable[[], object]

GPU_CACHE_BYTES = 64 * 2**20  #: More than the L2 of a GPU: 50 to 60 MB on an H200.
#: Relative error in the Frobenius norm that a check accepts.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class WrongResultError(Exception):
    """Raised when the result of an operation differs from the reference.

    The time of such an operation is not reported.
    """


@dataclass
class Setting:
    """The device and the options of a run.

    Args:
        device: the measured device.
        quick: use tiny sizes and one repeat, to test a part.
        repeats: timed rounds. Figures are their medians.
    """

    device: torch.device
    quick: bool = False
    repeats: int = 5
    remarks: list[str] = field(default_factory=list)  #: Notes on the figures, added by the parts.

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The usual dtype of weights and KV on such a device."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    @cached_property
    def copy_bandwidth(self) -> float:
        """Bytes per second (read plus written) of a large copy on the device.

        The faster of two copy kernels counts. The copies are not in a CUDA graph, which would be
        slower: 2.8 TB/s on an H200, where kernels move 4.1 TB/s.
        """
        nbytes = 2**22 if self.quick else 2**32 if self.is_gpu else 2**28
        source = torch.empty(nbytes // 4, dtype=torch.int32, device=self.device).random_()
        target = torch.empty_like(source)
        copies = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
        return 2 * nbytes / min(self.seconds([copy], graph=False) for copy in copies)

    @cached_property
    def gemm_flops(self) -> float:
        """FLOP/s of a large square matrix product in the device's dtype."""
        size = 128 if self.quick else 8192 if self.is_gpu else 2048
        a, b = (torch.randn(size, size, device=self.device).to(self.dtype) for _ in range(2))
        return 2 * size**3 / self.seconds([lambda: a @ b])

    def rotations(self, nbytes: int, most: int = 64) -> int:
        """Return how many sets of buffers, of `nbytes` each, exceed the device's cache."""
        if self.quick:
            return 2
        wanted = (4 * GPU_CACHE_BYTES) if self.is_gpu else 2**28
        return max(2, min(most, -(-wanted // max(1, nbytes))))

    def seconds(self, calls: Sequence[Call], *, graph: bool = True) -> float:
        """Return the seconds per call: the median of `repeats` rounds through all calls.

        Args:
            calls: the same operation on different buffers; see `rotations`.
            graph: whether to capture the calls into a CUDA graph. If False, the time includes
                launches.
        """
        rounds = 1 if self.quick else self.repeats
        if self.is_gpu:
            return _gpu_seconds(calls, rounds, graph) / len(calls)
        for call in calls[:2]:
            call()
        return statistics.median(_wall_seconds(calls) for _ in range(rounds)) / len(calls)


def _wall_seconds(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def _gpu_seconds(calls: Sequence[Call], rounds: int, graph: bool) -> float:
    """Return the seconds of all calls together, as the median of `rounds` measurements."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:  # compiles, allocates workspaces
            call()
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    def eager() -> None:
        for call in calls:
            call()

    run: Call = eager
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            eager()
        run = captured.replay
    run()
    once = _event_seconds(run, 1)
    # At least 5 ms per round, so that the cost of events is negligible.
    times = max(1, min(200, round(5e-3 / max(once, 1e-7))))
    return statistics.median(_event_seconds(run, times) / times for _ in range(rounds))


def _event_seconds(run: Call, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def check(name: str, got: Tensor, expected: Tensor, tolerance: float | None = None) -> float:
    """Return the relative error |got - expected| / |expected|.

    Args:
        name: name of the operation, for messages.
        got: the result.
        expected: the reference's result.
        tolerance: upper bound of the error. None selects the default for the dtype of `got`. 0
            requires equal bits.

    Raises:
        WrongResultError: the error exceeds the tolerance, or `got` has a NaN.
    """
    if got.shape != expected.shape:
        raise WrongResultError(f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}")
    bound = TOLERANCE[got.dtype] if tolerance is None else tolerance
    if bound == 0:
        if not torch.equal(got, expected):
            raise WrongResultError(
                f"{name}: {int((got != expected).sum())} of {got.numel()} elements differ"
            )
        return 0.0
    difference = (got.double() - expected.double()).norm()
    error = float(difference / expected.double().norm().clamp_min(1e-30))
    if not error <= bound:  # also rejects NaN
        raise WrongResultError(f"{name}: relative error {error:.2e} exceeds {bound:.0e}")
    return error


def gb_s(nbytes: float, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 1)


def tflop_s(flops: float, seconds: float) -> float:
    return round(flops / seconds / 1e12, 2)


def us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def best_peer(
    setting: Setting, peers: dict[str, Sequence[Call]], *, graph: bool = True
) -> tuple[str, float, Rows]:
    """Time all peers.

    Returns:
        The name of the fastest peer, its seconds (infinite if no peer runs), and a row per peer.
        The row has the peer's time, or the reason why the peer did not run.
    """
    seconds: dict[str, float] = {}
    rows: Rows = []
    for name, calls in peers.items():
        try:
            seconds[name] = setting.seconds(calls, graph=graph)
            rows.append({"peer": name, "us": us(seconds[name]), "not run": None})
        except Exception as error:  # torch has no kernel or no compiler for this peer
            reason = f"{type(error).__name__}: {error!s}".splitlines()[0]
            rows.append({"peer": name, "us": None, "not run": reason[:80]})
            if setting.is_gpu:
                torch.cuda.synchronize()
    name = min(seconds, key=seconds.__getitem__, default="none")
    return name, seconds.get(name, float("inf")), rows
