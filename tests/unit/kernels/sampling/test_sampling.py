"""Sampling without a full sort gives the tokens of a full sort, on all devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels import cpu
from baton_kernels.sampling import draw_tokens, greedy, triton_kernel
from baton_kernels.sampling.noise import gumbel_noise, noise_key
from baton_kernels.sampling.reference import draw_tokens_reference
from baton_kernels.sampling.torch_cpu import draw_tokens_cpu
from baton_kernels.sampling.triton_greedy import greedy_triton
from baton_kernels.sampling.triton_kernel import draw_tokens_triton
from baton_kernels.sampling.triton_search import gumbel_of
from support.kernels.launch_constants import launch_constants

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

VOCAB = 331  # not a multiple of a block or a tile
#: Small tiles, so that the kernels combine several.
CONFIG = {"tile": 128, "num_warps": 4, "row_tile": 256, "row_warps": 4}


@dataclass
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


ALL_PARAMS = [
    Params(),
    Params(temperature=1e-9),
    Params(min_p=0.05),
    Params(min_p=1.0),
    Params(top_k=1),
    Params(top_k=7, temperature=1.7),
    Params(top_k=VOCAB - 1),
    Params(top_k=VOCAB + 5),
    Params(top_k=2**64),
    Params(top_p=0.0),
    Params(top_p=1e-12),
    Params(top_p=0.6),
    Params(top_p=0.999, temperature=2.0),
    Params(top_k=40, top_p=0.8, min_p=0.01),
]


def keys_of(num_rows: int) -> list[int]:
    return [noise_key(seed=row, position=3 * row, sample_index=row % 2) for row in range(num_rows)]


def assert_draws_agree(logits: Tensor, params: list[Params], device: str) -> None:
    keys = keys_of(len(logits))
    expected = draw_tokens_reference(logits, params, keys).tolist()
    assert draw_tokens_cpu(logits, params, keys).tolist() == expected
    assert (
        draw_tokens(logits, params, keys).tolist() == expected
    )  # the C++ operation where it was compiled
    with launch_constants(CONFIG):
        assert draw_tokens_triton(logits.to(device), params, keys).tolist() == expected


def test_a_batch_of_different_parameters_matches_a_full_sort(triton_device: str) -> None:
    assert_draws_agree(3 * torch.randn(len(ALL_PARAMS), VOCAB), ALL_PARAMS, triton_device)


def test_ties_are_cut_as_by_a_stable_sort(triton_device: str) -> None:
    params = [Params(top_k=7), Params(top_p=0.6), Params(top_k=40, top_p=0.8, min_p=0.01)]
    assert_draws_agree(torch.randn(3, VOCAB).round(), params, triton_device)


@pytest.mark.parametrize(
    ("top_p_blocks", "capacity"),
    [(0.1, 64), (0.1, VOCAB), (31 / 32, 64), (31 / 32, VOCAB)],
    ids=["too few and too many", "too few", "too many", "enough"],
)
def test_draws_do_not_depend_on_the_number_of_gathered_tokens(
    top_p_blocks: float, capacity: int, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [Params(top_k=30), Params(top_p=0.9), Params(top_k=100, top_p=0.95)]
    logits = torch.randn(3, VOCAB).mul_(2).round_()
    monkeypatch.setattr(triton_kernel, "TOP_P_BLOCKS", top_p_blocks)
    monkeypatch.setattr(triton_kernel, "CAPACITY", capacity)
    assert_draws_agree(logits, params, triton_device)


def test_batches_without_filters_search_no_bounds(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(triton_kernel, "_block_maxima_kernel")
    monkeypatch.delattr(triton_kernel, "_bounds_kernel")
    params = [Params(temperature=1.3), Params(top_k=VOCAB), Params(top_k=-1)]
    assert_draws_agree(torch.randn(3, VOCAB), params, triton_device)


def test_masked_tokens_are_never_drawn(triton_device: str) -> None:
    params = [Params(), Params(top_k=5), Params(top_p=0.9), Params(top_k=4)]
    logits = torch.full((4, VOCAB), -math.inf)
    logits[:3, 200] = torch.tensor([-3e38, 0.0, 3e38])
    logits[3, [3, 100, 330]] = -0.0  # equal to 0.0, fewer than k
    logits[3, 7] = 0.0
    assert_draws_agree(logits, params, triton_device)


def test_top_k_and_top_p_keep_the_lower_ids_of_equal_logits(triton_device: str) -> None:
    logits = torch.zeros(40, VOCAB)
    params = [Params(top_k=2), Params(top_p=2.5 / VOCAB)] * 20
    for draw in (draw_tokens_cpu, draw_tokens):
        drawn = draw(logits, params, keys_of(40))
        assert set(drawn[::2].tolist()) == {0, 1}
        assert set(drawn[1::2].tolist()) == {0, 1, 2}
    assert_draws_agree(logits[:2], params[:2], triton_device)


def test_nan_is_not_drawn_and_rows_without_a_finite_logit_end(triton_device: str) -> None:
    logits = torch.randn(3, VOCAB)
    logits[0, ::2] = math.nan
    logits[1:] = torch.tensor([[-math.inf], [math.nan]])
    params = [Params(top_p=0.9), Params(top_k=3, top_p=0.5), Params()]
    expected = draw_tokens_reference(logits[:1].nan_to_num(-math.inf), params[:1], keys_of(1))
    with launch_constants(CONFIG):
        draws = [draw_tokens_triton(logits.to(triton_device), params, keys_of(3)).tolist()]
    if cpu.OPS is not None:
        draws.append(draw_tokens(logits, params, keys_of(3)).tolist())
    for drawn in draws:
        assert drawn[0] == expected.item()
        assert all(0 <= token < VOCAB for token in drawn)


@pytest.mark.parametrize("seed", range(200))
def test_draws_on_a_cpu_match_a_full_sort(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    params = Params(
        temperature=random.choice([1e-9, 0.1, 1.0, 5.0]),
        top_k=random.choice([0, random.randint(1, 60), random.randint(1, 3000)]),
        top_p=random.choice([0.0, 0.3, 0.95, 0.999999, 1.0]),
        min_p=random.choice([0.0, 1e-9, 0.1, 1.0]),
    )
    vocab_size = random.choice([random.randint(1, 3000), 20_000])
    logits = torch.randn(3, vocab_size) * random.choice([0.0, 0.01, 1.0, 3.0, 30.0])
    if levels := random.choice([0, 1, 4]):  # many equal logits
        logits = (logits * levels).round() / levels
    logits[torch.rand(logits.shape) < random.choice([0.0, 0.5, 0.999])] = -math.inf
    logits[:, random.randrange(logits.shape[1])] = 1.0
    keys = [noise_key(seed, row, 0) for row in range(3)]
    expected = draw_tokens_reference(logits, [params] * 3, keys)
    for draw in (draw_tokens_cpu, draw_tokens):
        assert draw(logits, [params] * 3, keys).tolist() == expected.tolist()


@pytest.mark.parametrize("scale", [0.1, 1.0, 1.7, 4.0], ids=["flat", "wide", "narrow", "peaked"])
def test_draws_match_a_full_sort_for_any_size_of_the_top_p_set(scale: float) -> None:
    """The sets hold from a few tokens to most of the vocabulary: every size of candidate set."""
    logits = torch.randn(6, 80_000) * scale
    params = [Params(top_p=top_p) for top_p in (0.2, 0.5, 0.8, 0.9, 0.99, 0.999)]
    expected = draw_tokens_reference(logits, params, keys_of(6)).tolist()
    for draw in (draw_tokens_cpu, draw_tokens):
        assert draw(logits, params, keys_of(6)).tolist() == expected


@pytest.mark.skipif(cpu.OPS is None, reason=f"CPU kernels: {cpu.DESCRIPTION}")
def test_compiled_draws_refuse_mismatched_arguments() -> None:
    with pytest.raises(RuntimeError, match="a value per row: 2, not 1"):
        cpu.OPS.draw_tokens(torch.zeros(2, 5), [1.0, 1.0], [0, 0], [1.0], [0.0, 0.0], [1, 2])
    for logits in (torch.zeros(2, 0), torch.zeros(5), torch.zeros(2, 5, dtype=torch.float16)):
        with pytest.raises(RuntimeError, match="float32 of shape"):
            cpu.OPS.draw_tokens(logits, [1.0, 1.0], [0, 0], [1.0, 1.0], [0.0, 0.0], [1, 2])
    assert draw_tokens(torch.zeros(0, 5), [], []).tolist() == []


@triton.jit
def _noise_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    key_ptr,
    first_id,
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    place = tl.arange(0, TILE)
    tl.store(out_ptr + place, gumbel_of(tl.load(key_ptr), first_id + place))


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1, noise_key(7, 8, 9)], ids=hex)
def test_triton_has_the_noise_of_the_cpu(key: int, triton_device: str) -> None:
    actual = torch.empty(256, dtype=torch.float64, device=triton_device)
    signed = key - 2**64 if key >= 2**63 else key
    _noise_kernel[(1,)](actual, torch.tensor([signed], device=triton_device), 1000, TILE=256)
    # The 52 random bits are equal. The logarithm may differ in the last bit.
    expected = gumbel_noise([key], 1256, torch.device("cpu"))[0, 1000:]
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("vocab_size", [1, 64, 1000])
def test_greedy_takes_the_lowest_id_of_the_best(vocab_size: int, triton_device: str) -> None:
    logits = torch.randn(5, vocab_size).mul_(3).round_()
    logits[1, vocab_size // 2 :] = -math.inf if vocab_size > 1 else 0.0
    expected = [row.index(max(row)) for row in logits.tolist()]
    on_cpu = greedy(logits, fallback=0)
    assert on_cpu.token_ids.tolist() == expected
    assert on_cpu.is_impossible is None
    with launch_constants(CONFIG):
        token_ids, is_impossible = greedy_triton(logits.to(triton_device), 0)
    assert token_ids.tolist() == expected
    assert not is_impossible.any()


def test_greedy_gives_the_fallback_to_rows_without_a_possible_token(triton_device: str) -> None:
    """A NaN counts as -inf. The lowest finite logit and an infinite one are possible."""
    nan, inf, lowest = math.nan, math.inf, torch.finfo(torch.float32).min
    logits = torch.randn(8, 300)
    logits[:7] = -inf
    logits[1, :200] = nan
    logits[2, [0, 170]] = torch.tensor([nan, -7.0])
    logits[3, [5, 170, 171]] = torch.tensor([3.0, inf, inf])
    logits[4, 299] = lowest
    logits[5, [0, 3, 100]] = torch.tensor([inf, nan, 1.0])
    logits[6] = nan
    expected = [40, 40, 170, 170, 299, 0, 40, int(logits[7].argmax())]
    on_cpu = greedy(logits, fallback=40)
    with launch_constants(CONFIG):
        on_device = greedy_triton(logits.to(triton_device), 40)
    for token_ids, is_impossible in (on_cpu, on_device):
        assert token_ids.tolist() == expected
        assert is_impossible.nonzero()[:, 0].tolist() == [0, 1, 6]
    assert greedy(logits[[2]], fallback=40).is_impossible is not None, "the row has a NaN"
