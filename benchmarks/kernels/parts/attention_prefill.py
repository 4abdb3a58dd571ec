"""Measures causal prefill attention of whole prompts and of chunks.

The rate of a large matrix product is the limit.
"""

from __future__ import annotations

from functools import partial

import torch
from goals import reached
from measure import Call, Result, Rows, Setting, best_peer, check, tflop_s, us
from paged_batch import HEAD_DIM, NUM_HEADS, Paged, random_cache

from parts.attention_peers import BACKENDS, checked, flex_causal, made, sdpa_causal

#: (query lengths, sequence lengths). Points with whole prompts of one length have peers.
POINTS = [
    ([8192], [8192]),
    ([2048] * 4, [2048] * 4),
    ([32768], [32768]),
    ([2048], [16384]),
    ([2048, 1, 511], [8192, 8192, 511]),
]
GOAL_LENGTH = 8192
NUM_LAYERS = 4
MOST_FOR_MATH = 8192  #: Maximum length for torch's "math" backend, which stores its scores.
MOST_FOR_FLEX = 8192


def run(setting: Setting) -> Result:
    points = [([40, 40], [40, 40]), ([20, 1], [50, 33])] if setting.quick else POINTS
    rows: Rows = []
    value = None
    num_tokens = max(sum(-(-length // 16) * 16 for length in lens) for _, lens in points)
    cache = random_cache(num_tokens, NUM_LAYERS, setting.dtype, setting.device)
    for query_lens, seq_lens in points:
        batch = Paged(cache, query_lens, seq_lens)
        _check(batch)
        seconds = setting.seconds([partial(batch.attend, layer) for layer in range(NUM_LAYERS)])
        row = {
            "part": "prefill attention",
            "queries": _in_short(query_lens),
            "context": _in_short(seq_lens),
            "us": us(seconds),
            "TFLOP/s": tflop_s(batch.cost.flops, seconds),
            "of GEMM": round(batch.cost.flops / seconds / setting.gemm_flops, 3),
        }
        rows.append(row)
        if query_lens == seq_lens and len(set(seq_lens)) == 1:
            peer, peer_seconds, peer_rows = best_peer(setting, _peers(batch))
            row |= {"best peer": peer, "against it": round(peer_seconds / seconds, 2)}
            rows += [
                {"part": "prefill attention, peers", "context": row["context"], **one}
                for one in peer_rows
            ]
            sdpa = [
                one["us"]
                for one in peer_rows
                if one["us"] is not None and one["peer"].startswith("SDPA")
            ]
            if seq_lens == [GOAL_LENGTH] and sdpa:
                value = min(sdpa) / us(seconds)
    return rows, reached("attention_prefill", value)


def _in_short(lengths: list[int]) -> str:
    return (
        f"{len(lengths)} x {lengths[0]}"
        if len(set(lengths)) == 1
        else " + ".join(map(str, lengths))
    )


def _check(batch: Paged) -> None:
    """Check the attention of the first, the last and some other queries of every sequence.

    Raises:
        WrongResultError: a result differs from the reference.
    """
    out = batch.attend(1)
    for seq, num_queries in enumerate(batch.query_lens):
        rows = torch.unique(
            torch.tensor([0, 1, num_queries // 3, num_queries - 1]).clamp(max=num_queries - 1)
        ).to(batch.device)
        first = int(batch.cu_seqlens_q[seq])
        check(f"prefill attention, sequence {seq}", out[first + rows], batch.expected(1, seq, rows))


def _peers(batch: Paged) -> dict[str, list[Call]]:
    num_seqs, length = len(batch.seq_lens), batch.seq_lens[0]
    query = batch.query.view(num_seqs, length, NUM_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    key, value = zip(*(batch.gathered(1, seq) for seq in range(num_seqs)), strict=True)
    sets = [(torch.stack(key), torch.stack(value))]
    peers: dict[str, list[Call]] = {}
    for name, backend in BACKENDS.items():
        if "math" not in name or length <= MOST_FOR_MATH:
            peers[name] = sdpa_causal(backend, query, sets, expanded=False)
            peers[f"{name}, keys per head"] = sdpa_causal(backend, query, sets, expanded=True)
    if length <= MOST_FOR_FLEX and num_seqs == 1:
        peers["FlexAttention"] = made(flex_causal, query, sets)
    rows = torch.tensor([length // 3, length - 1], device=batch.device)
    return checked(peers, batch.expected(1, 0, rows), lambda out: out[0].transpose(0, 1)[rows])
