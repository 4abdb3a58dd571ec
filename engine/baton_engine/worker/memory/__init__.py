"""The KV memory of one rank, and the handling of freed memory.

block_budget.py  how many blocks fit
freed_memory.py  whether malloc keeps the memory of freed tensors
kv_memory.py     the cache, the host blocks, and copies between them
peer_memory.py   the memory that the KV connector reads and writes for peers
"""
