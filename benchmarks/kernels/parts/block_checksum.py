"""Measures checksums of KV blocks against a GPU's copy bandwidth or one CPU core's read bandwidth.

The runs of contiguous bytes are in random order, like blocks. On a CPU one thread computes the
sums, as in the engine.
"""

from __future__ import annotations

import statistics
from functools import partial

import costs
import torch
from measure import Result, Rows, Setting, check, gb_s, us
from torch import Tensor

RUN_KIB = (16, 64, 1024, 4096)
MEMORY_BYTES = 2**29  #: More than the cache of any CPU.
#: Less than a core's own cache. These bytes are summed repeatedly. A longer run is summed alone.
CACHED_BYTES = 2**18
#: Bytes that one call sums in total, to make the call's own microseconds negligible.
AGAIN_BYTES = 2**26


def run(setting: Setting) -> Result:
    from baton_kernels.block_checksum import block_sums
    from baton_kernels.block_checksum.reference import word_sums_reference

    rows: Rows = []
    for kib in RUN_KIB[:2] if setting.quick else RUN_KIB:
        for place, nbytes in (
            ("cache", CACHED_BYTES),
            ("memory", 2**21 if setting.quick else MEMORY_BYTES),
        ):
            if place == "cache" and setting.is_gpu:
                continue  # a launch takes longer than the sum
            num_runs = max(1, nbytes // (kib * 1024))
            runs = torch.randint(-(2**62), 2**62, (num_runs, 1, kib * 128), device=setting.device)
            order = torch.randperm(num_runs)
            few = order[:3]
            if place == "cache" and not setting.quick:
                order = order.repeat(max(1, AGAIN_BYTES // runs.nbytes))
            summed = costs.block_checksum(kib * 1024, len(order)).nbytes
            expected = word_sums_reference(runs.cpu()[few, 0])
            check(f"sums of {kib} KiB", block_sums(runs, few, 0, 1).cpu(), expected, 0)
            seconds: list[float] = []
            read: list[float] = []
            # Measure both in turn, because other processes change the memory bandwidth.
            for _ in range(1 if setting.quick else setting.repeats):
                once = Setting(setting.device, setting.quick, repeats=1)
                read.append(_read_bandwidth(once))
                call = partial(block_sums, runs, order, 0, 1)
                # No graph: the block ids come from the host.
                seconds.append(once.seconds([call], graph=False))
            rows.append(
                {
                    "part": "block checksums",
                    "KiB": kib,
                    "runs": num_runs,
                    "in": place,
                    "us": us(statistics.median(seconds)),
                    "GB/s": gb_s(summed, statistics.median(seconds)),
                    "of reading memory": round(
                        statistics.median(
                            summed / one / rate for one, rate in zip(seconds, read, strict=True)
                        ),
                        3,
                    ),
                }
            )
    return rows, []


def _read_bandwidth(setting: Setting) -> float:
    """Return the bandwidth with which the checksums are compared, in bytes per second.

    This is the copy bandwidth of a GPU, or the read bandwidth of one CPU core.
    """
    if setting.is_gpu:
        return setting.copy_bandwidth
    data = _ordered(2**20 if setting.quick else MEMORY_BYTES)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ones = torch.ones(data.shape[1])
        return data.nbytes / min(
            setting.seconds([call]) for call in (lambda: data.sum(), lambda: torch.mv(data, ones))
        )
    finally:
        torch.set_num_threads(num_threads)


_kept: dict[int, Tensor] = {}


def _ordered(nbytes: int) -> Tensor:
    """Return a float32 tensor of `nbytes` bytes, of shape [rows, 4096].

    The tensor is created once, because the first access to a new page takes longer than a read.
    """
    if nbytes not in _kept:
        _kept[nbytes] = torch.ones(nbytes // 2**14, 2**12)
    return _kept[nbytes]
