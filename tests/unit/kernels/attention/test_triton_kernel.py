"""Paged attention in Triton matches the formula with every option."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.attention import paged_attention
from support.kernels.paged_cases import (
    DECODE,
    HEADS,
    LONG,
    MIXED,
    WINDOWS,
    assert_attends,
    dtypes,
    paged_case,
    poison_what_no_query_sees,
    triton_output,
)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_matches_the_formula(
    lengths: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    triton_device: str,
) -> None:
    case = paged_case(lengths, num_heads, num_kv_heads, head_dim, dtype=dtype)
    assert_attends(triton_output(case, triton_device), case)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", dtypes()[1:], ids=str)
def test_attention_of_every_head_size(
    head_dim: int, dtype: torch.dtype, triton_device: str
) -> None:
    case = paged_case([(1, 70), (20, 45)], 2, 1, head_dim, dtype=dtype)
    assert_attends(triton_output(case, triton_device), case)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128, 256])
def test_attention_with_shared_blocks_of_every_size(block_size: int, triton_device: str) -> None:
    case = paged_case(
        [(1, 260), (5, 37), (1, 1), (19, 19)],
        4,
        2,
        16,
        block_size=block_size,
        share_first_block=True,
    )
    assert_attends(triton_output(case, triton_device), case)


@pytest.mark.parametrize("window", WINDOWS[::2])
def test_attention_reads_only_the_window(window: int, triton_device: str) -> None:
    case = paged_case(LONG, 8, 2, 24, window=window)
    poison_what_no_query_sees(case)
    assert_attends(triton_output(case, triton_device), case)


def test_a_window_begins_after_the_first_tile_of_a_query_block(triton_device: str) -> None:
    # A program has 64 queries of one head. The last ones do not see the first tile of 32 tokens.
    case = paged_case([(64, 80)], 1, 1, 136, window=3)
    poison_what_no_query_sees(case)
    assert_attends(triton_output(case, triton_device, config={"KV_TILE": 32, "BLOCK_M": 64}), case)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize(
    ("soft_cap", "window"),
    [(2.5, None), (None, 21), (2.5, 21)],
    ids=["soft_cap", "window", "all"],
)
def test_attention_with_options(
    soft_cap: float | None,
    window: int | None,
    fp8: bool,
    dtype: torch.dtype,
    triton_device: str,
) -> None:
    case = paged_case(
        [(1, 40), (0, 7), (37, 70), (1, 1)],
        6,
        2,
        24,
        dtype=dtype,
        soft_cap=soft_cap,
        window=window,
        fp8=fp8,
    )
    case.scale *= 4  # scores that the cap changes
    assert_attends(triton_output(case, triton_device), case)
    assert_attends(triton_output(case, triton_device, max_seqlen_q=37), case)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of exp2 in tanh, whose result is 1
def test_a_soft_cap_bounds_scores_of_any_size(triton_device: str) -> None:
    case = paged_case(MIXED, 4, 2, 16, soft_cap=1.5)
    case.scale = 1e4
    assert_attends(triton_output(case, triton_device), case)


def test_sequences_without_queries_are_skipped(triton_device: str) -> None:
    case = paged_case([(0, 33), (1, 40), (0, 1), (0, 16), (5, 37), (0, 2)], 4, 2, 16)
    assert_attends(triton_output(case, triton_device), case)
    case = paged_case([(0, 33), (1, 40), (0, 1), (1, 3)], 4, 2, 16)
    assert_attends(triton_output(case, triton_device, max_seqlen_q=1), case)


@pytest.mark.parametrize("max_seqlen_q", [None, 1])
def test_a_sequence_of_length_zero_gives_zeros(
    max_seqlen_q: int | None, triton_device: str
) -> None:
    """Captured graphs have such padding, with any values in its row of the block table."""
    case = paged_case([(1, 40), (1, 200)], 4, 2, 16)
    expected = triton_output(case, triton_device)[0]
    case.seq_lens[1], case.block_tables[1] = 0, 2**30
    out = triton_output(case, triton_device, max_seqlen_q=max_seqlen_q)
    torch.testing.assert_close(out[0], expected, atol=2e-6, rtol=0)
    assert (out[1] == 0).all()


def test_attention_without_queries_returns_an_empty_tensor(triton_device: str) -> None:
    case = paged_case([(0, 5)], 4, 2, 16)
    assert triton_output(case, triton_device, max_seqlen_q=0).shape == (0, 4, 16)


def test_attention_writes_into_a_tensor_of_other_strides(triton_device: str) -> None:
    case = paged_case(MIXED, 4, 2, 16)
    moved = case.to(triton_device)
    buffer = torch.full((len(case.query), 6, 32), float("nan"), device=triton_device)
    out = buffer[:, 1:5, :16]
    assert paged_attention(*moved.arguments(), out=out) is out
    assert_attends(out, case)
    out.fill_(float("nan"))
    paged_attention(*moved.arguments(implementation="triton"), out=out)
    assert_attends(out, case)
    assert buffer[:, 0].isnan().all()
    assert buffer[..., 16:].isnan().all()


@pytest.mark.parametrize(
    ("config", "group"),
    [
        ({"BLOCK_M": 16, "KV_TILE": 16}, 4),
        ({"BLOCK_M": 32, "KV_TILE": 128}, 7),
        ({"BLOCK_M": 128, "KV_TILE": 32}, 16),
    ],
)
def test_configurations_do_not_change_the_result(
    config: dict[str, int], group: int, triton_device: str
) -> None:
    case = paged_case(MIXED, 2 * group, 2, 16)
    assert_attends(triton_output(case, triton_device, config=config), case)


def test_attention_refuses_unsupported_strides() -> None:
    case = paged_case(DECODE, 4, 4, 16)
    case.value_cache = case.value_cache.contiguous()
    with pytest.raises(ValueError, match="equal strides"):
        paged_attention(*case.arguments(implementation="triton"))
    case = paged_case(DECODE, 4, 4, 16)
    arguments = case.arguments(implementation="triton")
    with pytest.raises(ValueError, match="and out stride 1"):
        paged_attention(*arguments, out=torch.empty(len(case.query), 4, 32)[..., ::2])


@pytest.mark.parametrize("device", ["cpu", "triton"])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_every_device_has_the_options(device: str, fp8: bool, triton_device: str) -> None:
    case = paged_case(MIXED, 4, 2, 16, soft_cap=2.0, window=20, fp8=fp8)
    moved = case.to("cpu" if device == "cpu" else triton_device)
    assert_attends(paged_attention(*moved.arguments(max_seqlen_q=19), **moved.options), case)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="window must be positive"):
        paged_case(MIXED, 4, 2, 16, window=0).arguments()
    case = paged_case(MIXED, 4, 2, 16)
    case.scale = 0.0
    with pytest.raises(ValueError, match="must be positive"):
        paged_attention(*case.arguments())
    case = paged_case(MIXED, 4, 3, 16)
    with pytest.raises(ValueError, match="evenly"):
        paged_attention(*case.arguments())
    case = paged_case(MIXED, 4, 2, 16)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        paged_attention(*case.arguments(), key_scale=torch.ones(2), value_scale=torch.ones(2))
    with pytest.raises(ValueError, match="must be positive"):
        paged_case(MIXED, 4, 2, 16, soft_cap=0.0).arguments()
    with pytest.raises(ValueError, match=r"planned for queries of shape \[43, 4, 16\], not \[42,"):
        paged_attention(case.query[1:], *case.arguments()[1:])
    fp8 = paged_case(MIXED, 4, 2, 16, fp8=True)
    with pytest.raises(ValueError, match="key_scale and value_scale go with"):
        paged_attention(*fp8.arguments(), key_scale=torch.ones(2))
    case.query = case.query.half()
    with pytest.raises(ValueError, match="same dtype"):
        paged_attention(*case.arguments())
