"""Measures decode attention, with one query per sequence.

Copy bandwidth is the limit, because each key is read once.
"""

from __future__ import annotations

from functools import partial

import torch
from goals import reached
from measure import Call, Result, Rows, Setting, best_peer, check, gb_s, us
from paged_batch import HEAD_DIM, NUM_HEADS, Paged, random_cache

from parts.attention_peers import (
    BACKENDS,
    checked,
    flex_decode,
    flex_paged_decode,
    made,
    sdpa_decode,
)

#: (sequences, tokens per sequence).
POINTS = [
    (1, 4096),
    (16, 1024),
    (1, 131072),
    (8, 16384),
    (32, 4096),
    (128, 1024),
    (64, 4096),
    (256, 2048),
]
#: Points with all peers. The others leave out FlexAttention, which is compiled for every shape, and
#: torch's slow backend.
ALL_PEERS = {(1, 131072), (32, 4096)}
NUM_LAYERS = 32
LARGE = 128 * 1024  #: The goal applies from this many tokens on.


def run(setting: Setting) -> Result:
    points = [(2, 130), (3, 40)] if setting.quick else POINTS
    num_layers = 2 if setting.quick else NUM_LAYERS
    cache = random_cache(
        max(n * -(-t // 16) * 16 for n, t in points), num_layers, setting.dtype, setting.device
    )
    rows: Rows = []
    ratios: dict[str, float] = {}
    for num_seqs, num_tokens in points:
        batch = Paged(cache, [1] * num_seqs, [num_tokens] * num_seqs)
        check_decode(batch)
        seconds = setting.seconds([partial(batch.attend, layer) for layer in range(num_layers)])
        fraction = batch.cost.nbytes / seconds / setting.copy_bandwidth
        name = f"{num_seqs} x {num_tokens}"
        if num_seqs * num_tokens >= LARGE:
            ratios[name] = fraction
        peer, peer_seconds, peer_rows = best_peer(
            setting, _peers(batch, (num_seqs, num_tokens) in ALL_PEERS or setting.quick)
        )
        rows.append(
            {
                "part": "decode attention",
                "batch x context": name,
                "us": us(seconds),
                "GB/s": gb_s(batch.cost.nbytes, seconds),
                "of copy": round(fraction, 3),
                "best peer": peer,
                "against it": round(peer_seconds / seconds, 2),
            }
        )
        rows += [
            {"part": "decode attention, peers", "batch x context": name, **row} for row in peer_rows
        ]
    worst = min(ratios, key=ratios.__getitem__, default="")
    setting.remarks.append(
        f"Decode attention is furthest from the copy bandwidth at {worst}." if worst else ""
    )
    return rows, reached("attention_decode", ratios.get(worst))


def check_decode(batch: Paged) -> None:
    """Check the attention of some sequences in the first and the last layer.

    Raises:
        WrongResultError: a result differs from the reference.
    """
    for layer in {0, batch.num_layers - 1}:
        out = batch.attend(layer)
        for seq in {0, len(batch.seq_lens) // 2, len(batch.seq_lens) - 1}:
            expected = batch.expected(
                layer, seq, torch.zeros(1, dtype=torch.long, device=batch.device)
            )
            check(f"decode attention, sequence {seq}", out[seq : seq + 1], expected)


def _peers(batch: Paged, all_of_them: bool) -> dict[str, list[Call]]:
    num_seqs = len(batch.seq_lens)
    query = batch.query.view(num_seqs, NUM_HEADS, HEAD_DIM)
    num_sets = min(batch.num_layers, 4)  # together they exceed the cache, like the layers
    sets = []
    for layer in range(num_sets):
        key, value = zip(*(batch.gathered(layer, seq) for seq in range(num_seqs)), strict=True)
        sets.append((torch.stack(key), torch.stack(value)))
    peers = {
        name: sdpa_decode(backend, query, sets)
        for name, backend in BACKENDS.items()
        if all_of_them or "math" not in name
    }
    if all_of_them:
        peers["FlexAttention"] = made(flex_decode, query, sets)
        peers["FlexAttention, paged"] = made(flex_paged_decode, query, sets)
    expected = batch.expected(0, 0, torch.zeros(1, dtype=torch.long, device=batch.device))
    return checked(peers, expected, lambda out: out[0].reshape(1, NUM_HEADS, HEAD_DIM))
