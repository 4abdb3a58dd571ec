"""The limits of this machine: float32 GEMM rate and read bandwidth, measured with torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cached_property

import torch

from baton_kernels.linear import PackedWeight, linear


class Machine:
    """Measurements, for a process of their own."""

    def gemm_flops(self) -> dict[str, float]:
        """Return FLOP/s of a float32 product with plain and with packed weights; medians of 15."""
        rows, inner, columns = 512, 768, 6144  # of the model's widest layer
        x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
        packed = PackedWeight(weight)
        flops = 2 * rows * inner * columns
        return {
            "plain": flops / _median_s(lambda: linear(x, weight), 15),
            "packed": flops / _median_s(lambda: linear(x, packed), 15),
        }

    def read_bandwidth(self) -> float:
        """Return the bytes per second that all cores read together, over 1 GiB.

        It is the better of two kernels, each the median of 7.
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
