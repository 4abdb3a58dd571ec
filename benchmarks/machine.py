"""Measures the limits of this machine with torch: float32 GEMM rate and read bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cached_property

import torch

from baton_kernels.linear import PackedWeight, linear


class Machine:
    """Measures the limits of this machine, in a separate process (`remote.py`)."""

    def gemm_flops(self) -> dict[str, float]:
        """Return the float32 GEMM rate in FLOP/s, for `plain` and for `packed` weights.

        Each rate is the median of 15 calls.
        """
        rows, inner, columns = 512, 768, 6144  # sizes of the model's widest layer
        x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
        packed = PackedWeight(weight)
        flops = 2 * rows * inner * columns
        return {
            "plain": flops / _median_s(lambda: linear(x, weight), 15),
            "packed": flops / _median_s(lambda: linear(x, packed), 15),
        }

    def read_bandwidth(self) -> float:
        """Return the read bandwidth of all cores together, in bytes per second.

        A sum and a matrix-vector product each read 1 GiB, 7 times. The smaller median time counts.
        """
        data = self._gibibyte
        ones = torch.ones(2**14)
        matrix = data.view(-1, 2**14)
        by_sum = _median_s(lambda: data.sum(), 7)
        by_gemv = _median_s(lambda: torch.mv(matrix, ones), 7)
        return data.nbytes / min(by_sum, by_gemv)

    @cached_property
    def _gibibyte(self) -> torch.Tensor:
        return torch.ones(2**28)


def _median_s(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
