"""Draws without a full sort match draws with one, and all devices have the same noise."""

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
from baton_kernels.sampling.cpu import draw_tokens_cpu
from baton_kernels.sampling.noise import gumbel_noise, noise_key
from baton_kernels.sampling.reference import draw_tokens_reference
from baton_kernels.sampling.triton_greedy import greedy_triton
from baton_kernels.sampling.triton_kernel import draw_tokens_triton
from baton_kernels.sampling.triton_search import gumbel_of

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

VOCAB = 331  # no multiple of a block or a tile
CONFIG = {"tile": 128, "num_warps": 4, "row_tile": 256, "row_warps": 4}
"""Several tiles, so that there is something to join."""


@dataclass
class Wish:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


WISHES = [
    Wish(),
    Wish(temperature=1e-9),
    Wish(min_p=0.05),
    Wish(min_p=1.0),
    Wish(top_k=1),
    Wish(top_k=7, temperature=1.7),
    Wish(top_k=VOCAB - 1),
    Wish(top_k=VOCAB + 5),
    Wish(top_k=2**64),
    Wish(top_p=0.0),
    Wish(top_p=1e-12),
    Wish(top_p=0.6),
    Wish(top_p=0.999, temperature=2.0),
    Wish(top_k=40, top_p=0.8, min_p=0.01),
]


def keys_of(num_rows: int) -> list[int]:
    return [noise_key(seed=row, position=3 * row, sample_index=row % 2) for row in range(num_rows)]


def draws_agree(logits: Tensor, wishes: list[Wish], device: str) -> None:
    keys = keys_of(len(logits))
    expected = draw_tokens_reference(logits, wishes, keys).tolist()
    assert draw_tokens_cpu(logits, wishes, keys).tolist() == expected
    assert draw_tokens(logits, wishes, keys).tolist() == expected  # in C++ where that was compiled
    assert draw_tokens_triton(logits.to(device), wishes, keys, CONFIG).tolist() == expected


def test_a_batch_of_all_wishes_draws_what_a_sort_would(triton_device: str) -> None:
    draws_agree(3 * torch.randn(len(WISHES), VOCAB), WISHES, triton_device)


def test_ties_are_cut_where_a_stable_sort_cuts_them(triton_device: str) -> None:
    wishes = [Wish(top_k=7), Wish(top_p=0.6), Wish(top_k=40, top_p=0.8, min_p=0.01)]
    draws_agree(torch.randn(3, VOCAB).round(), wishes, triton_device)


def test_results_do_not_depend_on_how_many_tokens_were_gathered(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = [Wish(top_k=30), Wish(top_p=0.9), Wish(top_k=100, top_p=0.95)]
    logits = torch.randn(3, VOCAB).mul_(2).round_()
    monkeypatch.setattr(triton_kernel, "TOP_P_RANK", 1)  # far too few
    monkeypatch.setattr(triton_kernel, "CAPACITY", 64)  # room for too few
    draws_agree(logits, wishes, triton_device)


def test_masked_tokens_are_never_drawn(triton_device: str) -> None:
    wishes = [Wish(), Wish(top_k=5), Wish(top_p=0.9), Wish(top_k=4)]
    logits = torch.full((4, VOCAB), -math.inf)
    logits[:3, 200] = torch.tensor([-3e38, 0.0, 3e38])
    logits[3, [3, 100, 330]] = -0.0  # equal to 0.0, fewer than k
    logits[3, 7] = 0.0
    draws_agree(logits, wishes, triton_device)


def test_of_equal_logits_top_k_and_top_p_keep_the_lower_ids(triton_device: str) -> None:
    logits = torch.zeros(40, VOCAB)
    wishes = [Wish(top_k=2), Wish(top_p=2.5 / VOCAB)] * 20
    for draw in (draw_tokens_cpu, draw_tokens):
        drawn = draw(logits, wishes, keys_of(40))
        assert set(drawn[::2].tolist()) == {0, 1}
        assert set(drawn[1::2].tolist()) == {0, 1, 2}
    draws_agree(logits[:2], wishes[:2], triton_device)


def test_a_nan_is_not_drawn_and_hopeless_rows_end(triton_device: str) -> None:
    logits = torch.randn(3, VOCAB)
    logits[0, ::2] = math.nan
    logits[1:] = torch.tensor([[-math.inf], [math.nan]])
    wishes = [Wish(top_p=0.9), Wish(top_k=3, top_p=0.5), Wish()]
    expected = draw_tokens_reference(logits[:1].nan_to_num(-math.inf), wishes[:1], keys_of(1))
    draws = [draw_tokens_triton(logits.to(triton_device), wishes, keys_of(3), CONFIG).tolist()]
    if cpu.OPS is not None:
        draws.append(draw_tokens(logits, wishes, keys_of(3)).tolist())
    for drawn in draws:
        assert drawn[0] == expected.item()
        assert all(0 <= token < VOCAB for token in drawn)


@pytest.mark.skipif(cpu.OPS is None, reason=f"CPU kernels: {cpu.DESCRIPTION}")
@pytest.mark.parametrize("seed", range(200))
def test_compiled_draws_are_those_of_a_full_sort(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    wish = Wish(
        temperature=random.choice([1e-9, 0.1, 1.0, 5.0]),
        top_k=random.choice([0, random.randint(1, 60), random.randint(1, 3000)]),
        top_p=random.choice([0.0, 0.3, 0.95, 0.999999, 1.0]),
        min_p=random.choice([0.0, 1e-9, 0.1, 1.0]),
    )
    logits = torch.randn(3, random.randint(1, 3000)) * random.choice([0.0, 0.01, 1.0, 3.0, 30.0])
    if levels := random.choice([0, 1, 4]):  # many are equal
        logits = (logits * levels).round() / levels
    logits[torch.rand(logits.shape) < random.choice([0.0, 0.5, 0.999])] = -math.inf
    logits[:, random.randrange(logits.shape[1])] = 1.0
    keys = [noise_key(seed, row, 0) for row in range(3)]
    expected = draw_tokens_reference(logits, [wish] * 3, keys)
    assert draw_tokens(logits, [wish] * 3, keys).tolist() == expected.tolist()


@pytest.mark.skipif(cpu.OPS is None, reason=f"CPU kernels: {cpu.DESCRIPTION}")
def test_compiled_draws_refuse_what_does_not_fit() -> None:
    assert cpu.OPS is not None
    with pytest.raises(RuntimeError, match="a value per row: 2, not 1"):
        cpu.OPS.draw_tokens(torch.zeros(2, 5), [1.0, 1.0], [0, 0], [1.0], [0.0, 0.0], [1, 2])
    for logits in (torch.zeros(2, 0), torch.zeros(5), torch.zeros(2, 5, dtype=torch.float16)):
        with pytest.raises(RuntimeError, match="float32 of shape"):
            cpu.OPS.draw_tokens(logits, [1.0, 1.0], [0, 0], [1.0, 1.0], [0.0, 0.0], [1, 2])
    assert draw_tokens(torch.zeros(0, 5), [], []).tolist() == []


@triton.jit
def _noise_kernel(out_ptr, key_ptr, first_id, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.arange(0, TILE)
    tl.store(out_ptr + place, gumbel_of(tl.load(key_ptr), first_id + place))


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1, noise_key(7, 8, 9)], ids=hex)
def test_the_noise_is_that_of_the_cpu(key: int, triton_device: str) -> None:
    actual = torch.empty(256, dtype=torch.float64, device=triton_device)
    signed = key - 2**64 if key >= 2**63 else key
    _noise_kernel[(1,)](actual, torch.tensor([signed], device=triton_device), 1000, TILE=256)
    # Its 52 random bits are the same; log may differ in the last one.
    expected = gumbel_noise([key], 1256, torch.device("cpu"))[0, 1000:]
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("vocab_size", [1, 64, 1000])
def test_greedy_takes_the_first_of_the_best(vocab_size: int, triton_device: str) -> None:
    logits = torch.randn(5, vocab_size).mul_(3).round_()
    logits[1, vocab_size // 2 :] = -math.inf if vocab_size > 1 else 0.0
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert greedy(logits) == expected
    assert greedy_triton(logits.to(triton_device), CONFIG).tolist() == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_greedy_refuses_rows_without_a_finite_best(bad: float, triton_device: str) -> None:
    logits = torch.randn(3, 300)
    logits[1] = -math.inf
    logits[1, 170] = bad
    assert greedy(logits) is None
    result = greedy_triton(logits.to(triton_device), CONFIG)
    assert result.tolist() == [int(logits[0].argmax()), -1, int(logits[2].argmax())]
