"""The peers of Baton's attention: SDPA backends and FlexAttention of torch.

The keys and values of a peer are contiguous or paged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from measure import Call, WrongResultError, check
from paged_batch import NUM_HEADS, SCALE
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}
PAGE_SIZE = 128  #: Tokens of a FlexAttention page, which is a block of its mask.

#: Contiguous keys and values, [num_seqs, num_kv_heads, seq_len, head_dim] each.
KV = tuple[Tensor, Tensor]


def sdpa_decode(backend: SDPBackend, query: Tensor, sets: Sequence[KV]) -> list[Call]:
    """Return SDPA calls for decode, one for each set of keys and values.

    Query heads that share keys are passed as queries of one head, so that no mask is needed.

    Args:
        backend: the SDPA backend.
        query: one query per sequence, of shape [num_seqs, num_heads, head_dim].
        sets: keys and values of each call.
    """
    return [
        _with(backend, query.unflatten(1, (key.shape[1], -1)), key, value, {})
        for key, value in sets
    ]


def sdpa_causal(
    backend: SDPBackend, query: Tensor, sets: Sequence[KV], *, expanded: bool
) -> list[Call]:
    """Return SDPA calls for whole prompts, one for each set of keys and values.

    Args:
        backend: the SDPA backend.
        query: of shape [num_seqs, num_heads, seq_len, head_dim].
        sets: keys and values of each call.
        expanded: whether keys and values are repeated for each query head before the measurement.
            If False, SDPA itself shares them among query heads.
    """
    calls = []
    for key, value in sets:
        if expanded:
            key, value = (
                tensor.repeat_interleave(NUM_HEADS // tensor.shape[1], 1) for tensor in (key, value)
            )
        calls.append(
            _with(backend, query, key, value, {"is_causal": True, "enable_gqa": not expanded})
        )
    return calls


def _with(
    backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Call:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, scale=SCALE, **options)

    return call


def flex_decode(query: Tensor, sets: Sequence[KV]) -> list[Call]:
    """Return FlexAttention calls for decode on contiguous keys and values.

    The arguments are those of `sdpa_decode`.
    """
    flex = _flex(query.is_cuda)
    return [lambda kv=kv: flex(query[:, :, None], *kv, scale=SCALE, enable_gqa=True) for kv in sets]


def flex_causal(query: Tensor, sets: Sequence[KV]) -> list[Call]:
    """Return FlexAttention calls for whole prompts on contiguous keys and values.

    The arguments are those of `sdpa_causal`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    flex, length = _flex(query.is_cuda), query.shape[2]
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, length, length, device=str(query.device)
    )
    return [
        lambda kv=kv: flex(query, *kv, block_mask=mask, scale=SCALE, enable_gqa=True) for kv in sets
    ]


def flex_paged_decode(query: Tensor, sets: Sequence[KV]) -> list[Call]:
    """Return FlexAttention calls for decode on keys and values in torch's own pages.

    The arguments are those of `sdpa_decode`.
    """
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask

    flex, (num_seqs, num_kv_heads, length, head_dim) = _flex(query.is_cuda), sets[0][0].shape
    device = str(query.device)
    num_pages = num_seqs * -(-length // PAGE_SIZE)
    pages = PagedAttention(num_pages, PAGE_SIZE, num_seqs, device=device)
    for seq in range(num_seqs):
        pages.reserve(torch.tensor(seq, device=device), torch.tensor(length, device=device))
    seqs, positions = (torch.arange(n, device=device) for n in (num_seqs, length))
    mask = create_block_mask(
        lambda b, h, q, k: k < length,
        num_seqs,
        None,
        1,
        length,
        device=device,
        BLOCK_SIZE=PAGE_SIZE,
    )
    mask = pages.convert_logical_block_mask(mask)
    calls = []
    for key, value in sets:
        caches = [key.new_empty(1, num_kv_heads, num_pages * PAGE_SIZE, head_dim) for _ in range(2)]
        pages.assign(seqs, positions.expand(num_seqs, -1), key, value, *caches)
        calls.append(
            lambda caches=caches: flex(
                query[:, :, None], *caches, block_mask=mask, scale=SCALE, enable_gqa=True
            )
        )
    return calls


def made(make: Callable[..., list[Call]], *arguments: Any) -> list[Call]:
    """Return `make(*arguments)`. If `make` fails, return one call that raises the same error."""
    try:
        return make(*arguments)
    except Exception as error:
        return [_raises(error)]


def checked(
    peers: dict[str, list[Call]], expected: Tensor, rows: Callable[[Any], Tensor]
) -> dict[str, list[Call]]:
    """Check the result of each peer, and return the peers.

    The calls of a peer with a wrong result are replaced by one call that raises WrongResultError.

    Args:
        peers: calls by name.
        expected: the reference's rows.
        rows: selects these rows from the result of a call.
    """
    for name, calls in peers.items():
        try:
            got = rows(calls[0]())
        except Exception:  # reported when it is timed
            continue
        try:
            check(name, got, expected)
        except WrongResultError as error:
            peers[name] = [_raises(error)]
    return peers


def _raises(error: Exception) -> Call:
    def call() -> object:
        raise error

    return call


@cache
def _flex(compiled: bool) -> Callable[..., Any]:
    """Return torch's FlexAttention, compiled if `compiled`.

    On a CPU, FlexAttention is not compiled, because it is only tested there.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
