"""Paged attention: the CPU implementation and the Triton kernel against the formula."""

from __future__ import annotations

import pytest
import torch
from paged_cases import PagedCase, paged_case

from baton_kernels.attention import paged_attention
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
