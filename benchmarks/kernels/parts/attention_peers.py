"""The peers of attention: torch's SDPA backends and FlexAttention, on contiguous or paged KV."""

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
    """Make SDPA calls with one query per sequence, [num_seqs, num_heads, head_dim].

    The heads that share keys are passed as queries of one head, which needs no mask.
    """
    return [
        _with(backend, query.unflatten(1, (key.shape[1], -1)), key, value, {})
        for key, value in sets
    ]


def sdpa_causal(
    backend: SDPBackend, query: Tensor, sets: Sequence[KV], *, expanded: bool
) -> list[Call]:
    """Make SDPA calls for whole prompts.

    Args:
        backend: the SDPA backend.
        query: of shape [num_seqs, num_heads, seq_len, head_dim].
        sets: keys and values of each call.
        expanded: copy the keys per query head before the measurement. Otherwise the peer shares
            keys among heads itself.
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
    """Make FlexAttention calls on contiguous KV. Arguments as in `sdpa_decode`."""
    flex = _flex(query.is_cuda)
    return [lambda kv=kv: flex(query[:, :, None], *kv, scale=SCALE, enable_gqa=True) for kv in sets]


def flex_causal(query: Tensor, sets: Sequence[KV]) -> list[Call]:
    """Make FlexAttention calls on contiguous KV. Arguments as in `sdpa_causal`."""
    from torch.nn.attention.flex_attention import create_block_mask

    flex, length = _flex(query.is_cuda), query.shape[2]
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, length, length, device=str(query.device)
    )
    return [
        lambda kv=kv: flex(query, *kv, block_mask=mask, scale=SCALE, enable_gqa=True) for kv in sets
    ]


def flex_paged_decode(query: Tensor, sets: Sequence[KV]) -> list[Call]:
    """Make FlexAttention calls over torch's own pages. Arguments as in `sdpa_decode`."""
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
    """Make the calls. If this torch does not support them, return one that raises the reason."""
    try:
        return make(*arguments)
    except Exception as error:
        return [_raises(error)]


def checked(
    peers: dict[str, list[Call]], expected: Tensor, rows: Callable[[Any], Tensor]
) -> dict[str, list[Call]]:
    """Replace the calls of peers with a wrong result by a call that raises.

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
    """Return FlexAttention, compiled as intended; uncompiled on a CPU, where it is only tested."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
