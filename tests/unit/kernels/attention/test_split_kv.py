"""Split-KV decode on a GPU: which sequences are split, and the joined results."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.attention import (
    paged_attention,
    split_kv,
    split_kv_triton,
    triton_kernel,
    triton_plan,
)
from baton_kernels.attention.split_kv_triton import Partials
from baton_kernels.kernel_arguments import Heads
from baton_kernels.launch_configurations import Configuration, overriding
from support.kernels.paged_cases import (
    assert_attends,
    dtypes,
    paged_case,
    poison_what_no_query_sees,
    triton_output,
)
from support.kernels.split_cases import MANY, TILE, segments_of

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

H100 = {"num_sms": 132, "programs_per_sm": 2}

#: Tokens of a segment if the number of programs allows the maximum number of segments.
SEGMENT = split_kv.MIN_TILES * TILE


@pytest.mark.parametrize(
    ("max_seqlen_q", "group", "fits"),
    [(None, 4, False), (1, 4, True), (16, 4, True), (17, 4, False), (1, 71, True), (2, 71, False)],
)
def test_only_few_queries_fit_one_block(max_seqlen_q: int | None, group: int, fits: bool) -> None:
    assert split_kv.fits_one_block(max_seqlen_q, group) == fits


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "max_tiles", "segments"),
    [
        (1, 8, 100, 33),
        (65, 8, 100, 33),
        (66, 8, 100, 0),
        (1, 8, 6, 33),
        (1, 8, 5, 0),
        (1, 300, 6, 1),
    ],
    ids=["one", "not yet busy", "busy", "just long enough", "short", "many heads"],
)
def test_the_target_number_of_segments_fills_the_gpu(
    num_seqs: int, num_kv_heads: int, max_tiles: int, segments: int
) -> None:
    assert split_kv.target_segments(num_seqs, num_kv_heads, max_tiles, **H100) == segments


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_only_long_sequences_are_split(dtype: torch.dtype, triton_device: str) -> None:
    lengths = [(1, n) for n in (1, SEGMENT - 1, SEGMENT, 2 * SEGMENT, 2 * SEGMENT + 1, 300, 1)]
    case = paged_case(lengths, 8, 2, 24, dtype=dtype)
    assert segments_of(case, MANY, triton_device) == [1, 1, 1, 2, 2, 5, 1]


def test_one_segment_per_sequence_needs_no_reduce(triton_device: str) -> None:
    """The reduce kernel is not launched."""
    sms = triton_plan._num_sms(torch.device(triton_device))
    num_seqs = split_kv.ENOUGH_PROGRAMS_PER_SM * sms // 2
    case = paged_case([(1, 100)] * num_seqs, 2, 2, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernel, "join_segments_kernel", None)
        assert_attends(triton_output(case, triton_device, max_seqlen_q=1, config=MANY), case)
        # With padding, two blocks fewer than two segments need.
        short = paged_case([(1, SEGMENT), (1, 3)], 4, 2, 16)
        assert_attends(triton_output(short, triton_device, max_seqlen_q=1, config=MANY), short)


def test_more_sequences_than_one_scan_covers(triton_device: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv, "SCAN", 4)
        lengths = [1, 300, 2, 9, 70, 200, 3, 5, 129]
        case = paged_case([(1, n) for n in lengths], 1, 1, 16)
        assert segments_of(case, MANY, triton_device) == [1, 5, 1, 1, 1, 3, 1, 1, 2]


@pytest.mark.parametrize("window", [1, 40, 130])
def test_windows_are_split(window: int, triton_device: str) -> None:
    case = paged_case([(1, 300), (2, 200), (1, 7), (0, 90), (3, 131)], 4, 2, 16, window=window)
    poison_what_no_query_sees(case)
    segments = segments_of(case, MANY, triton_device)
    assert (max(segments) > 1) == (window == 130)


def test_the_last_segment_is_visible_only_to_the_last_query(triton_device: str) -> None:
    """Several queries per sequence, as in speculative decoding."""
    length = 6 * TILE + 1
    case = paged_case([(4, length), (1, 9), (3, length - 1)], 8, 2, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv, "MIN_TILES", 1)
        assert segments_of(case, MANY, triton_device) == [7, 1, 6]


@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.float32, False), *((dtype, True) for dtype in dtypes()[1:])], ids=str
)
def test_options_of_split_sequences(dtype: torch.dtype, fp8: bool, triton_device: str) -> None:
    lengths = [(1, 300), (0, 3), (1, 33), (1, 200)]
    case = paged_case(lengths, 6, 2, 80, dtype=dtype, soft_cap=3.0, window=180, fp8=fp8)
    assert max(segments_of(case, MANY, triton_device)) > 1


def test_the_reduce_kernel_joins_the_segments(triton_device: str) -> None:
    """More segments than one iteration joins. Some are empty, some are of other sequences."""
    segments, group, head_dim = 70, 3, 20
    scores = torch.randn(segments, 2, group, 5) * 20
    values = torch.randn(segments, 2, 5, head_dim)
    maxima = scores.amax(-1)
    weights = torch.exp2(scores - maxima[..., None])
    empty = [0, 1, 40]
    maxima[empty] = float("-inf")
    weights[empty] = 0
    scores[empty] = float("-inf")

    def pad(partial: torch.Tensor) -> torch.Tensor:
        """Pad with NaN: [segments, 2, group, ...] -> [segments + 2, 2, 16, ...]."""
        padded = torch.full((segments + 2, 2, 16, *partial.shape[3:]), float("nan"))
        padded[1:-1, :, :group] = partial
        return padded.to(triton_device)

    out = torch.full((2, 2 * group, head_dim), float("nan"), device=triton_device)
    split_kv_triton.join_segments_kernel[(2 * group, 2, 1)](
        Heads(out, *out.stride()[:2]),
        Partials(
            pad(weights @ values),
            pad(weights.sum(-1)),
            pad(maxima),
            torch.tensor([[0, 1], [1, segments]], dtype=torch.int32, device=triton_device),
        ),
        torch.tensor([0, 1, 2], dtype=torch.int32, device=triton_device),
        NUM_KV_HEADS=2,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=32,
        GROUP=group,
        BLOCK_M=16,
        SEGMENT_TILE=32,
    )
    shares = torch.softmax(
        scores.permute(1, 2, 0, 3).flatten(2) * torch.log(torch.tensor(2.0)), dim=-1
    )
    expected = shares @ values.transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(out[1].cpu(), expected.flatten(0, 1), atol=1e-5, rtol=1e-5)
    assert out[0].isnan().all(), "the reduce kernel skips a sequence of one segment"


def test_a_configuration_applies_only_to_its_number_of_rows(triton_device: str) -> None:
    """More rows need more shared memory, so a configuration for one row may fail for eight."""
    requested = []

    def lookup(operation: str, shape_class: str, default: Configuration) -> Configuration:
        requested.append(shape_class)
        return default

    with overriding(lookup):
        for longest in (1, 4, 8, 40):
            triton_output(
                paged_case([(longest, 41), (1, 3)], 8, 2, 16), triton_device, max_seqlen_q=longest
            )
    heights = ("decode/rows=16", "decode/rows=16", "decode/rows=32", "prefill")
    assert requested == [f"{height}/head_dim=16/float32" for height in heights]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_follows_lengths_and_block_tables() -> None:
    lengths = [(1, 3000), (1, 40), (1, 700), (1, 1)]
    first, second = (
        paged_case(order, 8, 2, 128, dtype=torch.bfloat16) for order in (lengths, lengths[::-1])
    )
    assert first.block_tables.shape == second.block_tables.shape
    device = first.to("cuda")
    out = torch.full_like(device.query, float("nan"))

    def attend() -> None:
        paged_attention(*device.arguments(max_seqlen_q=1), out=out)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for case in (first, second, first):
        out.fill_(float("nan"))
        device.query.copy_(case.query)
        device.block_tables.copy_(case.block_tables)
        device.seq_lens.copy_(case.seq_lens)
        device.key_cache._base.copy_(case.key_cache._base)
        graph.replay()
        assert_attends(out, case)
