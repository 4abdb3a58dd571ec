"""The memory of one rank's KV cache.

block_budget.py  how many blocks fit
kv_memory.py     the cache, the host blocks, and copies between them
peer_memory.py   the memory that the KV connector reads and writes for peers
"""
