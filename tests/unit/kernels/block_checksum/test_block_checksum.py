"""Word sums of blocks: equal in all implementations, and different after a change of any word."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.block_checksum import block_sums, sum_runs
from baton_kernels.block_checksum.reference import PERIOD, sum_runs_reference, word_sums_reference
from baton_kernels.block_checksum.triton_kernel import block_sums_triton
from support.kernels.launch_constants import launch_constants

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

MASK = 2**64 - 1
#: Lengths in words, around the vector width and the period of the weights.
LENGTHS = [0, 1, 7, 31, 32, 33, 1000, PERIOD - 1, PERIOD, PERIOD + 1, 2 * PERIOD + 97]


def random_words(num_words: int) -> np.ndarray:
    return np.frombuffer(
        np.random.default_rng(num_words).bytes(8 * num_words), dtype=np.uint64
    ).copy()


def plain_sum(words: np.ndarray) -> int:
    """The documented formula in integers that do not wrap."""

    def u(k: int) -> int:
        z = (k + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return (z ^ (z >> 31)) | 1

    terms = (
        (x ^ (x >> 32)) * u(i % PERIOD) * u(2**32 + i // PERIOD)
        for i, x in enumerate(words.tolist())
    )
    return sum(terms) & MASK


def one_sum(words: np.ndarray) -> int:
    return int(sum_runs(np.array([words.ctypes.data]), words.nbytes)[0])


@pytest.mark.parametrize("num_words", LENGTHS)
def test_sums_match_the_documented_formula(num_words: int) -> None:
    words = random_words(num_words)
    assert one_sum(words) == plain_sum(words)
    assert int(sum_runs_reference(np.array([words.ctypes.data]), words.nbytes)[0]) == plain_sum(
        words
    )


def test_each_run_gets_its_sum_at_any_address_and_number_of_threads() -> None:
    data = random_words(5000).view(np.uint8)
    addresses = data.ctypes.data + np.array([3, 0, 8191, 3, 20001, 12])
    expected = [
        plain_sum(data[start : start + 8 * 777].view(np.uint64))
        for start in addresses - data.ctypes.data
    ]
    for num_threads in (1, 3):
        sums = sum_runs(addresses, 8 * 777, num_threads)
        assert sums.dtype == np.uint64
        assert sums.tolist() == expected
    assert sum_runs(addresses[:0], 64).tolist() == []


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
@pytest.mark.parametrize("position", [0, 40, PERIOD, PERIOD + 50])
def test_a_flipped_bit_changes_the_sum(position: int, bit: int) -> None:
    words = random_words(PERIOD + 51)
    before = one_sum(words)
    words[position] ^= np.uint64(1 << bit)
    assert one_sum(words) != before


def test_swapped_words_change_the_sum() -> None:
    words = random_words(2 * PERIOD)
    for first, second in ((0, 1), (5, PERIOD + 5), (17, 2 * PERIOD - 1)):
        swapped = words.copy()
        swapped[[first, second]] = swapped[[second, first]]
        assert one_sum(swapped) != one_sum(words)


def test_invalid_lengths_and_thread_counts_are_refused() -> None:
    for nbytes, num_threads in ((-8, 1), (12, 1), (8, 0)):
        with pytest.raises(ValueError, match="multiple of 8"):
            sum_runs(np.array([0]), nbytes, num_threads)


@pytest.mark.skipif(cpu.OPS is None, reason=f"CPU kernels: {cpu.DESCRIPTION}")
def test_other_threads_run_while_a_sum_is_computed() -> None:
    words = np.zeros(2**22, dtype=np.uint64)
    addresses = np.full(400, words.ctypes.data)
    begun, ended = threading.Event(), threading.Event()

    def compute_sums() -> None:
        begun.set()
        # Few addresses, so that numpy itself does not release the GIL.
        sum_runs(addresses, words.nbytes)
        ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # a thread runs only when the other one releases the GIL
    summing = threading.Thread(target=compute_sums)
    try:
        summing.start()
        assert begun.wait(60)
        assert not ended.is_set()
    finally:
        sys.setswitchinterval(interval)
        summing.join()


#: The last one is longer than the period of the weights.
CACHES = [
    (torch.float32, (7, 3, 2, 2, 5, 24)),
    (torch.bfloat16, (4, 2, 3, 2, 7, 20)),
    (torch.float16, (3, 1, 2, 16411)),
]


def expected_sums(cache: Tensor, block_ids: Tensor, first_head: int, num_heads: int) -> Tensor:
    heads = cache.cpu()[block_ids, first_head : first_head + num_heads]
    return word_sums_reference(heads.flatten(1).view(torch.uint8).view(torch.int64))


@pytest.mark.parametrize(("dtype", "shape"), CACHES, ids=lambda value: str(value))
def test_sums_of_head_ranges_match_the_reference_on_every_device(
    dtype: torch.dtype, shape: tuple[int, ...], triton_device: str
) -> None:
    cache = torch.randn((*shape[:-1], shape[-1] - shape[-1] % 4)).to(dtype)
    cache[:, :, 0, ..., -1] = float("nan")  # checksums are of bytes, not of numbers
    block_ids = torch.tensor([2, 0, 2, shape[0] - 1])
    for first_head in range(shape[1]):
        for num_heads in range(1, shape[1] - first_head + 1):
            expected = expected_sums(cache, block_ids, first_head, num_heads)
            assert block_sums(cache, block_ids, first_head, num_heads).tolist() == expected.tolist()
            for config in (None, {"tile": 64, "tiles": 2}):
                with launch_constants(config):
                    actual = block_sums_triton(
                        cache.to(triton_device), block_ids, first_head, num_heads
                    )
                assert actual.tolist() == expected.tolist()


def test_no_blocks_give_no_sums(triton_device: str) -> None:
    cache = torch.randn(2, 2, 8)
    none = torch.empty(0, dtype=torch.int64)
    assert block_sums(cache, none, 0, 1).tolist() == []
    assert block_sums_triton(cache.to(triton_device), none, 0, 1).tolist() == []


def test_invalid_blocks_heads_and_caches_are_refused() -> None:
    cache, block_ids = torch.randn(4, 3, 8), torch.tensor([0, 1])
    with pytest.raises(IndexError, match="outside the cache's 4 blocks"):
        block_sums(cache, torch.tensor([0, 4]), 0, 1)
    with pytest.raises(IndexError, match="outside"):
        block_sums(cache, torch.tensor([-1]), 0, 1)
    with pytest.raises(ValueError, match=r"3 heads, not \[2, 4\)"):
        block_sums(cache, block_ids, 2, 2)
    with pytest.raises(ValueError, match="int64"):
        block_sums(cache, block_ids.int(), 0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        block_sums(cache[:, :2], block_ids, 0, 1)
    with pytest.raises(ValueError, match="multiple of 8 bytes, not 12"):
        block_sums(torch.randn(4, 3, 3), block_ids, 0, 1)


@pytest.mark.parametrize("kernels", ["torch", "avx2"])
def test_older_processors_compute_the_same_sums(kernels: str) -> None:
    program = """
import numpy as np
from baton_kernels.block_checksum import sum_runs
words = np.arange(20007, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
lengths = 1, 15, 16, 17, 8192, 20006
print(*(int(sum_runs(np.array([words.ctypes.data + 8]), 8 * n)[0]) for n in lengths))
"""

    output = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"BATON_CPU_KERNELS": kernels},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    words = np.arange(20007, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    expected = " ".join(str(plain_sum(words[1 : n + 1])) for n in (1, 15, 16, 17, 8192, 20006))
    assert output.strip() == expected
