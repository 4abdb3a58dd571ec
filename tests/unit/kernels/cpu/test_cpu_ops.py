"""The compiled CPU operations match their torch references."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.activation import silu_and_mul
from baton_kernels.activation.reference import silu_and_mul_reference
from baton_kernels.attention import paged_attention, plan_attention
from baton_kernels.kv_write import plan_write
from baton_kernels.norm.reference import add_rms_norm_reference, rms_norm_reference
from baton_kernels.rope import rotary_angles
from baton_kernels.rope.reference import rotate_qk_reference
from support.kernels.paged_cases import (
    TOLERANCE,
    PagedCase,
    assert_attends,
    large_memory,
    layer_views,
    paged_case,
)

if cpu.OPS is None:
    pytest.skip(f"CPU kernels: {cpu.DESCRIPTION}", allow_module_level=True)

DTYPES = list(TOLERANCE)
DIMS = [1, 7, 16, 63, 768]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_norms_match_their_references(rows: int, dim: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(shape).to(dtype) for shape in ((rows, dim), (rows, dim), (dim,))
    )
    assert_close(cpu.OPS.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    normed, total = cpu.OPS.add_rms_norm(x, residual, weight, 1e-6)
    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6)
    assert_close(normed, expected_normed)
    torch.testing.assert_close(total, expected_total, atol=0, rtol=0)


def test_a_norm_on_several_threads_matches_its_reference() -> None:
    x = torch.randn(300, 4, 600).transpose(0, 1)  # strided, and large enough for several threads
    weight = torch.rand(600)
    assert_close(cpu.OPS.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


def test_a_norm_refuses_a_weight_of_another_length() -> None:
    with pytest.raises(RuntimeError, match="the weight differ"):
        cpu.OPS.rms_norm(torch.randn(2, 8), torch.rand(4), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_silu_and_mul_matches_its_reference(rows: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = (8 * torch.randn(rows, 2 * dim)).to(dtype)
    assert_close(cpu.OPS.silu_and_mul(gate_up), silu_and_mul_reference(gate_up))


def test_silu_of_extreme_values() -> None:
    gates = torch.tensor(
        [-torch.inf, -3e38, -1e30, -100.0, -87.5, -1e-30, 0.0, 1e-30, 87.5, 100.0, 1e30, torch.nan]
    )
    gate_up = torch.stack((gates, torch.ones_like(gates)), -1)
    actual, expected = cpu.OPS.silu_and_mul(gate_up), silu_and_mul_reference(gate_up)
    torch.testing.assert_close(actual, expected, atol=1e-30, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("head_dim", [2, 24, 80, 96, 128])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_rotate_qk_matches_its_reference(
    num_tokens: int, head_dim: int, norm: bool, dtype: torch.dtype
) -> None:
    padded = torch.randn(num_tokens, (6 + 2 * 2) * head_dim + 3).to(dtype)
    qkv = padded[:, 3:]  # rows are not contiguous
    cos, sin = rotary_angles(torch.randint(0, 1000, (num_tokens,)), torch.rand(head_dim // 2))
    weights = [torch.rand(head_dim).to(dtype) for _ in range(2)] if norm else [None, None]
    actual = cpu.OPS.rotate_qk(qkv, 6, 2, cos, sin, *weights, 1e-6)
    expected = rotate_qk_reference(qkv, 6, 2, cos, sin, *weights, 1e-6)
    for pair in zip(actual, expected, strict=True):
        assert_close(*pair)


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_is_rounded_to_the_dtype_of_the_cache(
    dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    kv_cache = torch.full((5, 2, 3, 2, 4, 20), 7.0, dtype=cache_dtype)
    key, value = (torch.randn(3, 2, 20).to(dtype) for _ in range(2))
    cpu.OPS.write_kv(key, value, *layer_views(kv_cache, layer=1), torch.tensor([18, -1, 3]))
    expected = torch.full_like(kv_cache, 7.0)
    for token, block, slot in ((0, 4, 2), (2, 0, 3)):
        expected[block, :, 1, 0, slot] = key[token].to(cache_dtype)
        expected[block, :, 1, 1, slot] = value[token].to(cache_dtype)
    torch.testing.assert_close(kv_cache, expected, atol=0, rtol=0)


def test_a_slot_outside_the_cache_is_refused() -> None:
    kv_cache = torch.zeros(2, 1, 3, 2, 4, 8)
    rows = torch.ones(1, 1, 8)
    with pytest.raises(IndexError, match="slot 8 lies past"):
        cpu.OPS.write_kv(rows, rows, *layer_views(kv_cache, layer=1), torch.tensor([8]))
    assert not kv_cache.any()


def check_attention(case: PagedCase) -> None:
    out = torch.full_like(case.query, torch.nan)
    assert paged_attention(*case.arguments(), out=out, **case.options) is out
    assert_attends(out, case)


LENGTHS = [(1, 37), (0, 5), (3, 70), (1, 1), (9, 9), (1, 130)]


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_every_head_size(head_dim: int, dtype: torch.dtype) -> None:
    check_attention(paged_case(LENGTHS, 4, 2, head_dim, dtype=dtype, share_first_block=True))


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 21])
def test_attention_of_every_block_size(block_size: int, window: int | None) -> None:
    check_attention(paged_case(LENGTHS, 2, 1, 40, block_size=block_size, window=window))


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 8, 40])
def test_attention_of_every_group_size(group_size: int) -> None:
    num_kv_heads = 2 if group_size < 9 else 1
    check_attention(paged_case(LENGTHS, num_kv_heads * group_size, num_kv_heads, 16))


@pytest.mark.parametrize("window", [None, 600])
def test_attention_of_split_sequences(window: int | None) -> None:
    check_attention(paged_case([(1, 1300), (2, 513), (1, 1024)], 4, 2, 16, window=window))


@pytest.mark.parametrize("window", [None, 21, 181])
def test_masks_in_tiles_of_whole_vectors(window: int | None) -> None:
    """Some rows do not see the end, or with window 181 the beginning, of a full tile."""
    check_attention(paged_case([(2, 128), (12, 256), (1, 384), (12, 512)], 4, 2, 16, window=window))


def test_soft_caps() -> None:
    case = paged_case(LENGTHS, 4, 2, 24, soft_cap=2.0)
    case.query *= 10
    check_attention(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_threads_or_the_batch(dtype: torch.dtype) -> None:
    """A sequence's last token has the same bits alone and at the end of a chunk in a batch."""
    case = paged_case([(1, 1500), (4, 700), (1, 33)], 8, 4, 64, dtype=dtype)
    together = paged_attention(*case.arguments())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        torch.testing.assert_close(paged_attention(*case.arguments()), together, atol=0, rtol=0)
    finally:
        torch.set_num_threads(threads)
    query, starts = case.query[4:5], torch.tensor([0, 1], dtype=torch.int32)
    alone = plan_attention(
        query, case.key_cache, case.block_tables[1:2], starts, case.seq_lens[1:2]
    )
    last = paged_attention(query, case.key_cache, case.value_cache, alone, case.scale)
    torch.testing.assert_close(last, together[4:5], atol=0, rtol=0)


def test_offsets_exceed_32_bits() -> None:
    """17 GB of untouched memory lie between the two blocks."""
    heads, block_size, head_dim, stride = 2, 16, 64, 2**32 + 2048
    memory = large_memory(stride + 2 * heads * block_size * head_dim, torch.float32)
    strides = (stride, 2 * block_size * head_dim, head_dim, 1)
    keys = memory.as_strided((2, heads, block_size, head_dim), strides)
    values = memory[block_size * head_dim :].as_strided((2, heads, block_size, head_dim), strides)
    key, value = torch.randn(2, 16, heads, head_dim)
    cpu.OPS.write_kv(key, value, keys, values, torch.arange(16, 32))
    query = torch.randn(1, 4, head_dim)
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 1], [16]))
    block_0, block_1 = (
        plan_attention(query, keys, torch.tensor([[block]], dtype=torch.int32), starts, lengths)
        for block in range(2)
    )
    near = paged_attention(query, keys[1:].clone(), values[1:].clone(), block_0, 0.125)
    far = paged_attention(query, keys, values, block_1, 0.125)
    torch.testing.assert_close(far, near, atol=0, rtol=0)


def test_a_missing_block_is_refused() -> None:
    case = paged_case([(1, 17)], 2, 1, 16)
    case.block_tables[0, 1] = 2**30
    with pytest.raises(IndexError, match="does not exist"):
        paged_attention(*case.arguments())


@pytest.mark.parametrize("seq_len", [0, 17])
@pytest.mark.parametrize("cu_seqlens_q", [[0, 3], [-1, 1], [2, 1]])
def test_query_ranges_outside_the_batch_are_refused(cu_seqlens_q: list[int], seq_len: int) -> None:
    case = paged_case([(2, 17)], 2, 1, 16)
    case.cu_seqlens_q[:] = torch.tensor(cu_seqlens_q)
    case.seq_lens[0] = seq_len
    with pytest.raises(
        ValueError, match=f"from {cu_seqlens_q[0]} to {cu_seqlens_q[1]}, but there are 2"
    ):
        paged_attention(*case.arguments())


def test_empty_caches_are_refused() -> None:
    rows, no_slots, no_heads = torch.ones(1, 1, 8), torch.zeros(2, 1, 0, 8), torch.zeros(2, 0, 4, 8)
    with pytest.raises(IndexError, match="slot 0 lies past"):
        cpu.OPS.write_kv(rows, rows, no_slots, no_slots.clone(), torch.tensor([0]))
    one = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([[1]], [0, 1], [1])]
    with pytest.raises(RuntimeError, match="do not fit together"):
        cpu.OPS.paged_attention(rows.clone(), rows, no_heads, no_heads, *one, 1.0, None, None)


def test_attention_without_sequences_returns_an_empty_tensor() -> None:
    case = paged_case([(1, 5)], 2, 1, 16)
    query, sequences = (
        case.query[:0],
        (case.block_tables[:0], case.cu_seqlens_q[:1], case.seq_lens[:0]),
    )
    none = plan_attention(query, case.key_cache, *sequences)
    out = paged_attention(query, case.key_cache, case.value_cache, none, 1.0)
    assert out.shape == (0, 2, 16)


def test_compiled_operations_need_no_gather_or_write_plan() -> None:
    plan = paged_case([(1, 5)], 2, 1, 16).arguments()[3]
    assert plan.implementation == "cpp"
    assert plan.gather is None
    cache = torch.zeros(1, 1, 16, 8)
    assert plan_write(cache, torch.tensor([3])) is None
    assert plan_write(cache.to(torch.float8_e4m3fn), torch.tensor([3])) is not None


def test_every_operation_can_be_traced() -> None:
    case = paged_case([(1, 5), (2, 9)], 4, 2, 16)
    out, cache = torch.empty_like(case.query), torch.zeros(2, 4, 1, 2, 8, 8)
    keys, values = layer_views(cache, 0)
    x, weight, qkv = torch.randn(3, 8), torch.rand(8), torch.randn(3, 64)
    angles = rotary_angles(torch.arange(3), torch.rand(4))
    checks = ("test_schema", "test_faketensor")
    arguments = {
        "rms_norm": (x, weight, 1e-6),
        "add_rms_norm": (x, x.clone(), weight, 1e-6),
        "rotate_qk": (qkv, 4, 2, *angles, None, None, 0.0),
        "silu_and_mul": (x,),
        "write_kv": (
            torch.randn(3, 4, 8),
            torch.randn(3, 4, 8),
            keys.clone(),
            values.clone(),
            torch.arange(3),
        ),
        "paged_attention": (
            out,
            case.query,
            *contiguous(case),
            *(case.block_tables, case.cu_seqlens_q, case.seq_lens),
            case.scale,
            None,
            None,
        ),
    }
    for name, values_ in arguments.items():
        torch.library.opcheck(getattr(cpu.OPS, name), values_, test_utils=checks)


def contiguous(case: PagedCase) -> tuple[Tensor, Tensor]:
    return case.key_cache.nan_to_num(), case.value_cache.nan_to_num()


def test_large_results_use_memory_of_freed_results_until_it_is_returned() -> None:
    """Malloc would map new memory for each result of 32 MiB or more."""
    assert cpu.OPS is not None
    gate_up = torch.zeros(1024, 2 * 9000)  # a result of 35 MiB

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        silu_and_mul(gate_up)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    cpu.OPS.keep_freed_results(1 << 30)
    cpu.OPS.return_freed_results()
    fresh = page_faults()
    assert fresh > 10  # 17 huge pages and the rest, or 9,000 pages of 4 KiB
    assert min(page_faults() for _ in range(5)) == 0
    cpu.OPS.return_freed_results()
    assert page_faults() > 10
    cpu.OPS.keep_freed_results(32 << 20)  # returns the memory, and keeps no result of this size
    assert min(page_faults() for _ in range(5)) > 10


def test_a_process_that_sets_no_maximum_keeps_no_freed_results() -> None:
    """The kernels do not know how much memory the process may use."""
    program = """
import resource, torch
from baton_kernels.activation import silu_and_mul

gate_up = torch.zeros(1024, 2 * 9000)
faults = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    silu_and_mul(gate_up)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(done.stdout) > 10


@pytest.mark.parametrize("max_kept", [300 << 20, 200 << 20])
def test_memory_of_the_largest_results_is_not_kept_in_place_of_smaller_ones(max_kept: int) -> None:
    assert cpu.OPS is not None
    weight = torch.ones(1024)
    large, small = torch.zeros(60 * 1024, 1024), torch.zeros(25 * 1024, 1024)  # 240 and 100 MiB
    cpu.OPS.keep_freed_results(max_kept)
    cpu.OPS.rms_norm(large, weight, 1e-6)
    cpu.OPS.rms_norm(small, weight, 1e-6)  # both together exceed the maximum
    if max_kept < large.nbytes:
        cpu.OPS.rms_norm(large, weight, 1e-6)  # the large one alone exceeds it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cpu.OPS.rms_norm(small, weight, 1e-6)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    cpu.OPS.return_freed_results()
    assert faults < 10  # 50 huge pages, if the memory were new


def test_live_results_have_memory_of_their_own() -> None:
    gate_up = torch.ones(1024, 2 * 9000)
    first, second = silu_and_mul(gate_up), silu_and_mul(2 * gate_up)
    assert torch.equal(first, silu_and_mul(gate_up))
    assert not torch.equal(first, second)
