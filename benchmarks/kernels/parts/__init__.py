"""The parts of the benchmark. The `run` of each module checks one operation and times it.

attention_decode: one query per sequence, compared with torch's attention.
attention_prefill: whole prompts and chunks, compared with torch's attention.
attention_peers: the torch implementations with which both attention parts compare.
cpu_attention: C++ decode attention, compared with the read bandwidth.
kv_write, block_copy, block_checksum: copies and checksums of KV blocks.
elementwise: normalisation, rotary embedding and activation.
moe: routing and experts.
sampling: choosing a token from logits.
engine_step: a whole decode step, compared with the sum of its kernels.
"""
