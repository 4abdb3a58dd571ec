"""The measured parts: each module's `run` checks one operation and times it.

attention_decode: one query per sequence, against torch's attention.
attention_prefill: whole prompts and chunks, against torch's attention.
attention_peers: the torch implementations that both compare with.
cpu_attention: C++ decode attention, against the read bandwidth.
kv_write, block_copy, block_checksum: copies and sums of KV blocks.
elementwise: normalisation, rotary embedding and activation.
moe: routing and experts.
sampling: choosing a token from logits.
engine_step: a whole decode step, against the sum of its kernels.
"""
