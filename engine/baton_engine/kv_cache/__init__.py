"""Bookkeeping of an engine's KV blocks: holders, prefix cache, swapping and offloading.

No torch.
"""
