"""Measures decode attention on a CPU.

The read bandwidth of all cores is the limit, because each key is read once. A separate process
measures the bandwidth before and after each round of attention. Other users of a shared machine
change the bandwidth within seconds. Rounds with such a change are left out.
"""

from __future__ import annotations

import statistics
from functools import partial

import machine
from goals import reached
from measure import Result, Rows, Setting, check, gb_s, us
from paged_batch import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, Paged
from remote import Remote
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from baton_engine.worker.memory.kv_memory import KVMemory
from baton_kv_transfer.memory.layout import KVCacheLayout
from parts.attention_decode import check_decode

#: (sequences, tokens per sequence).
POINTS = [(1, 4096), (4, 4096), (16, 256)]
GOAL_CONTEXT = 4096
NUM_LAYERS = 32
STEADY = 0.87  #: Lower bound of (smaller / larger bandwidth) before and after a steady round.
BUDGET_BYTES = 4 * 2**30  #: Upper bound of the cache. Fewer layers are used if 32 exceed it.


def run(setting: Setting) -> Result:
    reader = None if setting.quick else Remote(machine.Machine)

    def read_bandwidth() -> float:
        return setting.copy_bandwidth if reader is None else reader.call("read_bandwidth", 3)

    rows: Rows = []
    fractions: list[float] = []
    for num_seqs, num_tokens in [(1, 70), (3, 40)] if setting.quick else POINTS:
        batch = _batch(setting, num_seqs, num_tokens)
        check_decode(batch)
        layers = range(batch.num_layers)
        gathered = [_gather(batch, layer) for layer in range(min(2, batch.num_layers))]
        by_peer = _sdpa(batch, *gathered[0])
        check("torch SDPA on gathered KV", by_peer, batch.attend(0), 1e-3)
        whole = [partial(_gather_sdpa, batch, layer) for layer in layers[:4]]
        seconds: dict[str, list[float]] = {"ours": [], "SDPA": [], "gather, SDPA": []}
        read: list[tuple[float, float]] = []
        once = Setting(setting.device, repeats=1)
        for _ in range(1 if setting.quick else 3 * setting.repeats):
            before = read_bandwidth()
            seconds["ours"].append(once.seconds([partial(batch.attend, layer) for layer in layers]))
            read.append((before, read_bandwidth()))
            seconds["SDPA"].append(once.seconds([partial(_sdpa, batch, *kv) for kv in gathered]))
            seconds["gather, SDPA"].append(once.seconds(whole))
        median = {name: statistics.median(values) for name, values in seconds.items()}
        nbytes = batch.cost.nbytes
        steady = [
            (nbytes / one, (before + after) / 2)
            for one, (before, after) in zip(seconds["ours"], read, strict=True)
            if min(before, after) > STEADY * max(before, after)
        ]
        fraction = statistics.median(ours / rate for ours, rate in steady) if steady else None
        if num_tokens == GOAL_CONTEXT and fraction is not None:
            fractions.append(fraction)
        rows.append(
            {
                "part": "CPU decode attention",
                "batch x context": f"{num_seqs} x {num_tokens}",
                "us": us(median["ours"]),
                "GB/s": gb_s(nbytes, median["ours"]),
                "of read": None if fraction is None else round(fraction, 3),
                "read GB/s": round(
                    statistics.median(rate for pair in read for rate in pair) / 1e9, 1
                ),
                "steady rounds": f"{len(steady)} of {len(read)}",
                "against SDPA on gathered KV": round(median["SDPA"] / median["ours"], 2),
                "against gathering and SDPA": round(median["gather, SDPA"] / median["ours"], 2),
            }
        )
    if reader is not None:
        reader.close()
    return rows, reached("cpu_attention", min(fractions, default=None))


def _batch(setting: Setting, num_seqs: int, num_tokens: int) -> Paged:
    """Return a batch whose KV cache is allocated as in the engine.

    The memory has huge pages if possible.
    """
    num_blocks = num_seqs * -(-num_tokens // BLOCK_SIZE) + 1
    per_layer = num_blocks * NUM_KV_HEADS * 2 * BLOCK_SIZE * HEAD_DIM * setting.dtype.itemsize
    num_layers = 2 if setting.quick else min(NUM_LAYERS, BUDGET_BYTES // per_layer)
    layout = KVCacheLayout(
        num_blocks=num_blocks,
        num_kv_heads=NUM_KV_HEADS,
        num_layers=num_layers,
        block_size=BLOCK_SIZE,
        head_dim=HEAD_DIM,
        dtype=str(setting.dtype).removeprefix("torch."),
        name="NHL2BD",
    )
    cache = KVMemory(layout, 0, setting.device).cache
    cache.normal_()
    return Paged(cache, [1] * num_seqs, [num_tokens] * num_seqs)


def _gather(batch: Paged, layer: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one layer as contiguous tensors.

    Both have the shape [num_seqs, num_kv_heads, seq_len, head_dim].
    """
    tables = batch.block_tables.long()
    length = batch.seq_lens[0]
    key, value = (
        batch.cache[:, :, layer, which][tables].permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :length]
        for which in range(2)
    )
    return key, value


def _sdpa(batch: Paged, key: Tensor, value: Tensor) -> Tensor:
    """Return torch's SDPA of the batch on contiguous keys and values.

    Query heads that share keys are passed as queries of one head, so that no keys are copied.
    """
    query = batch.query.unflatten(1, (NUM_KV_HEADS, -1))
    return scaled_dot_product_attention(query, key, value, scale=SCALE).view(
        -1, NUM_HEADS, HEAD_DIM
    )


def _gather_sdpa(batch: Paged, layer: int) -> Tensor:
    return _sdpa(batch, *_gather(batch, layer))
