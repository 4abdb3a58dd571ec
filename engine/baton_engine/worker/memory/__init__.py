"""The memory of one rank's KV cache, and what happens to freed memory.

block_budget.py  how many blocks fit
freed_memory.py  what malloc does with the tensors of a step
kv_memory.py     the cache, the host blocks, and copies between them
peer_memory.py   the memory that the KV connector reads and writes for peers
"""
