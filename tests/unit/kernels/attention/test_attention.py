"""Paged attention on a CPU matches the formula, with and without compiled operations."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import cpu
from baton_kernels.attention import paged_attention
from support.kernels.paged_cases import (
    DECODE,
    HEADS,
    LONG,
    MIXED,
    PREFILL,
    WINDOWS,
    assert_attends,
    layer_views,
    paged_case,
    poison_what_no_query_sees,
)


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "OPS", None)
    elif cpu.OPS is None:
        pytest.skip(f"CPU kernels: {cpu.DESCRIPTION}")


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_cpu_attention_matches_the_formula(
    lengths: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = paged_case(lengths, num_heads, num_kv_heads, head_dim)
    assert_attends(paged_attention(*case.arguments()), case)


def test_cpu_attention_matches_the_formula_in_bfloat16() -> None:
    case = paged_case(MIXED, 8, 2, 32, dtype=torch.bfloat16)
    assert_attends(paged_attention(*case.arguments()), case)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (100, None), (None, 5.0)])
def test_long_prompts_in_bfloat16_match_the_formula(
    head_dim: int, window: int | None, soft_cap: float | None
) -> None:
    """Prompts span many tiles, and the first tiles have no key inside a window."""
    lengths = [(300, 300), (1, 500), (130, 700), (17, 17), (64, 64)]
    case = paged_case(
        lengths, 4, 2, head_dim, dtype=torch.bfloat16, window=window, soft_cap=soft_cap
    )
    if window is not None:
        poison_what_no_query_sees(case)
    assert_attends(paged_attention(*case.arguments()), case)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_sequences_that_share_a_block_match_the_formula(block_size: int) -> None:
    case = paged_case(MIXED, 4, 2, 16, block_size=block_size, share_first_block=True)
    # Only a full block can be shared.
    assert case.seq_lens[0] >= block_size
    assert_attends(paged_attention(*case.arguments()), case)


@pytest.mark.parametrize("window", WINDOWS)
def test_cpu_attention_reads_only_the_window(window: int) -> None:
    case = paged_case(LONG, 8, 2, 24, window=window)
    poison_what_no_query_sees(case)
    assert_attends(paged_attention(*case.arguments()), case)


def test_a_window_longer_than_the_sequences_changes_nothing() -> None:
    case = paged_case(LONG, 4, 2, 16)
    expected = paged_attention(*case.arguments())
    case.window = 300
    torch.testing.assert_close(paged_attention(*case.arguments()), expected, atol=0, rtol=0)


def test_many_decodes_of_different_lengths_match_the_formula() -> None:
    """Several groups, with sequences without queries between them."""
    lengths = [(0, 3) if index % 7 == 3 else (1, 1 + 37 * index % 331) for index in range(60)]
    case = paged_case(lengths, 6, 2, 64)
    assert_attends(paged_attention(*case.arguments()), case)


@pytest.mark.parametrize("window", [None, 3])
def test_a_sequence_without_tokens_gives_zeros(window: int | None) -> None:
    case = paged_case([(1, 5), (1, 7), (2, 9), (1, 3)], 2, 1, 16, window=window)
    case.seq_lens[1:3] = 0
    out = paged_attention(*case.arguments(), out=torch.full_like(case.query, torch.nan))
    assert not out[1:4].any()
    assert_attends(out, case)


def test_cpu_attention_is_precise_in_float32() -> None:
    case = paged_case([(1, 900), (1, 700), (33, 600)], 6, 2, 64)
    expected = paged_attention(*case.arguments(implementation="reference"))
    torch.testing.assert_close(paged_attention(*case.arguments()), expected, atol=1e-5, rtol=0)


def test_other_cache_layouts_match_the_formula() -> None:
    """Keys and values in separate tensors, and heads before blocks."""
    case = paged_case(MIXED, 4, 2, 16)
    case.key_cache = case.key_cache.transpose(0, 1).contiguous().transpose(0, 1)
    case.value_cache = case.value_cache.transpose(0, 1).contiguous().transpose(0, 1)
    assert_attends(paged_attention(*case.arguments()), case)


def test_cpu_attention_refuses_unsupported_strides() -> None:
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
    *first_layer, plan, scale = case.arguments()
    assert_attends(paged_attention(*first_layer, plan, scale), case)
    case.query, kv_cache = torch.randn_like(case.query), case.key_cache._base
    kv_cache[:, :, 2] = torch.randn_like(kv_cache[:, :, 2])
    case.key_cache, case.value_cache = layer_views(kv_cache, layer=2)
    second = paged_attention(case.query, case.key_cache, case.value_cache, plan, scale)
    assert_attends(second, case)


@pytest.mark.parametrize(
    "lengths", [[(1, 130), (1, 20)], [(1, 60), (1, 50)], [(1, 20), (1, 130), (1, 25)]]
)
def test_cpu_attention_returns_decodes_in_the_order_of_the_batch(
    lengths: list[tuple[int, int]],
) -> None:
    case = paged_case(lengths, 4, 2, 16)
    assert_attends(paged_attention(*case.arguments()), case)
