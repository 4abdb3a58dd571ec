"""Paged attention: the CPU implementation and the Triton kernel against the formula."""

from __future__ import annotations

import pytest
import torch
from paged_cases import PagedCase, layer_views, paged_case

from baton_kernels.attention import paged_attention, plan_attention
from baton_kernels.attention.reference import paged_attention_reference
from baton_kernels.attention.triton_kernel import paged_attention_triton

# (query length, total length) per sequence
DECODE = [(1, 1), (1, 17), (1, 16), (1, 63)]
PREFILL = [(1, 1), (7, 7), (33, 33)]
MIXED = [(1, 40), (5, 37), (1, 1), (19, 19), (16, 48), (1, 65)]
HEADS = [(4, 4, 16), (8, 2, 32), (6, 2, 24), (5, 1, 40)]  # (query heads, KV heads, head_dim)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dtypes() -> list[torch.dtype]:
    """bfloat16 only where there is a GPU: the interpreter's bf16 `tl.dot` is wrong."""
    return [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def assert_attends(actual: torch.Tensor, case: PagedCase) -> None:
    expected = paged_attention_reference(*case.arguments())
    assert not expected.isnan().any(), "the case itself is broken"
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_cpu_attention_is_the_formula(
    lengths: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = paged_case(lengths, num_heads, num_kv_heads, head_dim)
    assert_attends(paged_attention(*case.arguments()), case)


def test_cpu_attention_in_bfloat16() -> None:
    case = paged_case(MIXED, 8, 2, 32, dtype=torch.bfloat16)
    assert_attends(paged_attention(*case.arguments()), case)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_cpu_attention_with_shared_blocks(block_size: int) -> None:
    case = paged_case(MIXED, 4, 2, 16, block_size=block_size, share_first_block=True)
    # Sharing is only meaningful where the first block of sequence 0 is full.
    assert case.seq_lens[0] >= block_size
    assert_attends(paged_attention(*case.arguments()), case)


def poison_what_no_query_sees(case: PagedCase) -> None:
    """NaN into every token that lies behind the window of its sequence's first query of the step."""
    assert case.window is not None
    block_size = case.key_cache.shape[2]
    for seq, seq_len in enumerate(case.seq_lens.tolist()):
        num_queries = int(case.cu_seqlens_q[seq + 1] - case.cu_seqlens_q[seq])
        for position in range(max(0, seq_len - num_queries - case.window + 1)):
            block = case.block_tables[seq, position // block_size]
            case.key_cache[block, :, position % block_size] = float("nan")
            case.value_cache[block, :, position % block_size] = float("nan")


# Block size 16: one token, less than a block, a block, more, a tile of the kernel, longer than all but two sequences
WINDOWS = [1, 5, 16, 37, 64, 200]
LONG = [(1, 40), (5, 37), (1, 1), (19, 19), (16, 48), (1, 300), (70, 131), (1, 65), (40, 230)]


@pytest.mark.parametrize("window", WINDOWS)
def test_cpu_attention_sees_just_the_window(window: int) -> None:
    case = paged_case(LONG, 8, 2, 24, window=window)
    poison_what_no_query_sees(case)
    assert_attends(paged_attention(*case.arguments()), case)


def test_a_window_longer_than_the_sequences_changes_nothing() -> None:
    case = paged_case(LONG, 4, 2, 16)
    expected = paged_attention(*case.arguments())
    case.window = 300
    torch.testing.assert_close(paged_attention(*case.arguments()), expected, atol=0, rtol=0)


def test_cpu_attention_of_many_decodes_of_all_lengths() -> None:
    """Several groups, and sequences without queries in between."""
    lengths = [(0, 3) if index % 7 == 3 else (1, 1 + 37 * index % 331) for index in range(60)]
    case = paged_case(lengths, 6, 2, 64)
    assert_attends(paged_attention(*case.arguments()), case)


def test_cpu_attention_is_exact_in_float32() -> None:
    case = paged_case([(1, 900), (1, 700), (33, 600)], 6, 2, 64)
    expected = paged_attention_reference(*case.arguments())
    torch.testing.assert_close(paged_attention(*case.arguments()), expected, atol=1e-5, rtol=0)


def test_cpu_attention_of_caches_laid_out_otherwise() -> None:
    """Keys and values apart, and heads before blocks."""
    case = paged_case(MIXED, 4, 2, 16)
    case.key_cache = case.key_cache.transpose(0, 1).contiguous().transpose(0, 1)
    case.value_cache = case.value_cache.transpose(0, 1).contiguous().transpose(0, 1)
    assert_attends(paged_attention(*case.arguments()), case)


def test_cpu_attention_refuses_strides_it_cannot_address() -> None:
    case = paged_case(DECODE, 4, 4, 16)
    case.value_cache = case.value_cache.contiguous()
    with pytest.raises(ValueError, match="equal strides"):
        paged_attention(*case.arguments())
    case.key_cache = case.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="strides 16 and 1 within a block"):
        paged_attention(*case.arguments())


@pytest.mark.parametrize("window", [None, 30])
def test_a_plan_serves_every_layer_of_a_step(window: int | None) -> None:
    case = paged_case(LONG, 4, 2, 16, window=window)
    plan = plan_attention(case.key_cache, case.block_tables, case.cu_seqlens_q, case.seq_lens, window)
    first = paged_attention(*case.arguments(), plan=plan)
    assert_attends(first, case)
    case.query, layer_1 = torch.randn_like(case.query), case.key_cache._base
    layer_1[:, :, 2] = torch.randn_like(layer_1[:, :, 2])
    case.key_cache, case.value_cache = layer_views(layer_1, layer=2)
    assert_attends(paged_attention(*case.arguments(), plan=plan), case)


@pytest.mark.parametrize("lengths", [[(1, 130), (1, 20)], [(1, 60), (1, 50)], [(1, 20), (1, 130), (1, 25)]])
def test_cpu_attention_answers_decodes_in_the_order_of_the_batch(lengths: list[tuple[int, int]]) -> None:
    case = paged_case(lengths, 4, 2, 16)
    assert_attends(paged_attention(*case.arguments()), case)


def triton_output(case: PagedCase, device: str) -> torch.Tensor:
    moved = case.to(device)
    poisoned = torch.full_like(moved.query, float("nan"))
    return paged_attention_triton(*moved.arguments(), out=poisoned)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_triton_attention_is_the_formula(
    lengths: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    triton_device: str,
) -> None:
    case = paged_case(lengths, num_heads, num_kv_heads, head_dim, dtype=dtype)
    assert_attends(triton_output(case, triton_device), case)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_triton_attention_with_shared_blocks(block_size: int, triton_device: str) -> None:
    case = paged_case(MIXED, 4, 2, 16, block_size=block_size, share_first_block=True)
    assert_attends(triton_output(case, triton_device), case)


@pytest.mark.parametrize("window", WINDOWS)
def test_triton_attention_sees_just_the_window(window: int, triton_device: str) -> None:
    case = paged_case(LONG, 8, 2, 24, window=window)
    poison_what_no_query_sees(case)
    assert_attends(triton_output(case, triton_device), case)


def test_triton_attention_with_a_window_that_begins_behind_a_querys_first_tile(triton_device: str) -> None:
    # Tiles of 32 tokens, 64 queries of one head in a program: the last of them do not see the first tile at all.
    case = paged_case([(64, 80)], 1, 1, 136, window=3)
    poison_what_no_query_sees(case)
    assert_attends(triton_output(case, triton_device), case)


def test_triton_attention_with_a_window_in_float16(triton_device: str) -> None:
    case = paged_case(LONG, 5, 1, 40, dtype=torch.float16, window=21)
    assert_attends(triton_output(case, triton_device), case)


def test_triton_attention_of_one_long_prompt(triton_device: str) -> None:
    case = paged_case([(70, 131)], 4, 1, 64)
    assert_attends(triton_output(case, triton_device), case)


def test_triton_attention_refuses_strides_it_cannot_address() -> None:
    case = paged_case(DECODE, 4, 4, 16)
    case.value_cache = case.value_cache.contiguous()
    with pytest.raises(ValueError, match="equal strides"):
        paged_attention_triton(*case.arguments())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_addresses_blocks_past_two_billion_elements() -> None:
    """Block offsets in int32 would wrap around in a cache this large."""
    head_dim, block_size = 128, 16
    num_blocks = 2**31 // (8 * 2 * block_size * head_dim) + 64
    kv_cache = torch.zeros(num_blocks, 8, 1, 2, block_size, head_dim, dtype=torch.float16, device="cuda")
    case = paged_case([(1, block_size)], 16, 8, head_dim, dtype=torch.float16)
    last = num_blocks - 1
    kv_cache[last, :, 0, 0] = case.key_cache[case.block_tables[0, 0]].cuda()
    kv_cache[last, :, 0, 1] = case.value_cache[case.block_tables[0, 0]].cuda()
    table = torch.tensor([[last]], dtype=torch.int32, device="cuda")
    out = paged_attention(
        case.query.cuda(),
        kv_cache[:, :, 0, 0],
        kv_cache[:, :, 0, 1],
        table,
        case.cu_seqlens_q.cuda(),
        case.seq_lens.cuda(),
        case.scale,
    )
    assert_attends(out, case)
