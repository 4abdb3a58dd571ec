"""Measures the choice of tokens from logits.

Copy bandwidth is the limit. Peers use torch.sort or torch.topk. The time includes launches:
sampling runs outside of CUDA graphs, because its parameters come from the host in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import costs
import torch
from measure import Call, Result, Rows, Setting, WrongResultError, best_peer, gb_s, us
from torch import Tensor

from baton_kernels.sampling import draw_tokens, greedy
from baton_kernels.sampling.noise import noise_key

VOCAB_SIZE = 128256
NUM_ROWS = [1, 64, 256]
NUM_ROWS_ON_CPU = [1, 16, 64]
TOP_K, TOP_P = 50, 0.9
NUM_CHECKED = 16
#: Lower bound of the rows with the reference's token. The last bit of an exponential can differ.
AGREEMENT = 0.9


@dataclass(frozen=True)
class Filters:
    """The sampling parameters of one row, as in `baton_kernels.sampling.DrawParams`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


Peer = Callable[[Tensor], Tensor]


def run(setting: Setting) -> Result:
    vocab_size = 1000 if setting.quick else VOCAB_SIZE if setting.is_gpu else 32000
    params = {
        "all tokens": Filters(),
        "top k": Filters(top_k=TOP_K),
        "top p": Filters(top_p=TOP_P),
        "top k, top p, min p": Filters(top_k=TOP_K, top_p=TOP_P, min_p=0.01),
    }
    rows: Rows = []
    for num_rows in [3] if setting.quick else NUM_ROWS if setting.is_gpu else NUM_ROWS_ON_CPU:
        first = _logits(setting, num_rows, vocab_size)
        nbytes = costs.sampling(first).nbytes
        others = setting.rotations(nbytes, 16) - 1
        sets = [first, *(_logits(setting, num_rows, vocab_size) for _ in range(others))]
        keys = [noise_key(seed, 7, 0) for seed in range(num_rows)]
        _check_greedy(sets[0])
        calls: dict[str, list[Call]] = {"greedy": [partial(_greedy, logits) for logits in sets]}
        for name, one in params.items():
            _check_draws(name, sets[0], [one] * num_rows, keys)
            calls[name] = [partial(draw_tokens, logits, [one] * num_rows, keys) for logits in sets]
        for name, ours in calls.items():
            seconds = setting.seconds(ours, graph=False)
            peers: dict[str, list[Call]] = {
                peer: [partial(call, logits) for logits in sets]
                for peer, call in PEERS[name].items()
            }
            peer, peer_seconds, _ = best_peer(setting, peers, graph=False)
            rows.append(
                {
                    "part": "sampling",
                    "filters": name,
                    "rows": num_rows,
                    "us": us(seconds),
                    "GB/s": gb_s(nbytes, seconds),
                    "of copy": round(nbytes / seconds / setting.copy_bandwidth, 3),
                    "best peer": peer,
                    "against it": round(peer_seconds / seconds, 2),
                }
            )
    return rows, []


def _logits(setting: Setting, num_rows: int, vocab_size: int) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, device=setting.device)


def _check_greedy(logits: Tensor) -> None:
    if _greedy(logits) != logits.argmax(-1).tolist():
        raise WrongResultError("greedy: not the most likely tokens")


def _check_draws(name: str, logits: Tensor, params: list[Filters], keys: list[int]) -> None:
    """Check the tokens of the first NUM_CHECKED rows against the reference, which is slow.

    Raises:
        WrongResultError: too many tokens differ.
    """
    from baton_kernels.sampling.reference import draw_tokens_reference

    got = draw_tokens(logits, params, keys)[:NUM_CHECKED].cpu()
    expected = draw_tokens_reference(
        logits[:NUM_CHECKED].cpu(), params[:NUM_CHECKED], keys[:NUM_CHECKED]
    )
    agree = float((got == expected).double().mean())
    if agree < AGREEMENT:
        raise WrongResultError(
            f"sampling with {name}: {agree:.0%} of rows get the reference's token"
        )


def _greedy(logits: Tensor) -> list[int]:
    token_ids: list[int] = greedy(logits, fallback=0).token_ids.tolist()
    return token_ids


def _peer_greedy(logits: Tensor) -> Tensor:
    tokens = logits.argmax(-1)
    tokens.tolist()  # as _greedy does
    return tokens


def _peer_softmax(logits: Tensor) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1)


def _peer_top_k(logits: Tensor) -> Tensor:
    best, ids = logits.topk(TOP_K)
    return ids.gather(-1, torch.multinomial(best.softmax(-1), 1))


def _peer_sort(logits: Tensor) -> Tensor:
    ordered, ids = logits.sort(descending=True)
    return ids.gather(-1, torch.multinomial(_within_top_p(ordered), 1))


def _peer_top_k_top_p(logits: Tensor) -> Tensor:
    best, ids = logits.topk(TOP_K)
    return ids.gather(-1, torch.multinomial(_within_top_p(best), 1))


def _within_top_p(ordered: Tensor) -> Tensor:
    """Return the probabilities of the sorted logits, with 0 for tokens outside of top-p."""
    probs = ordered.softmax(-1)
    return probs.masked_fill(probs.cumsum(-1) - probs >= TOP_P, 0)


PEERS: dict[str, dict[str, Peer]] = {
    "greedy": {"torch argmax": _peer_greedy},
    "all tokens": {"torch softmax, multinomial": _peer_softmax},
    "top k": {"torch topk, multinomial": _peer_top_k},
    "top p": {"torch sort, multinomial": _peer_sort},
    "top k, top p, min p": {"torch topk, multinomial": _peer_top_k_top_p},
}
