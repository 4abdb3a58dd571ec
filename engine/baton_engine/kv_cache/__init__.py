"""The scheduler's side of the KV cache: blocks of a fixed number of tokens. Does not import torch.

kv_cache_manager  blocks of each sequence: allocate, fork, swap, cache, free
kv_sequence       the tokens and blocks of one sequence
block_pool        free blocks and the prefix cache
offload           prefix blocks in host memory
"""
