"""Tensor operations of the models: Triton on a GPU, C++ on a CPU where it was compiled (cpu), else torch.

One folder or file per operation. A folder holds `__init__.py` (formula, shapes, dispatcher by device), `reference.py` (the plain
truth that tests compare with) and `triton_kernel.py`, imported only when a GPU tensor arrives.

    attention       paged attention over the KV cache, prefill and decode in one call
    block_checksum  word sums of KV blocks, by which a transfer proves what arrived
    block_copy      copies whole KV blocks, on the device and between device and host
    kv_write        puts new keys and values into their slots
    sampling        the most likely token, or a draw of what top_k, top_p and min_p keep
    norm, rope, activation, moe
"""
