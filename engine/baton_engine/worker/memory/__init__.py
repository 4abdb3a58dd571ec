"""The KV memory of one rank, and the handling of freed memory.

block_budget.py  how many blocks fit
freed_memory.py  how much memory of freed tensors the process keeps
host_memory.py   how much host memory is available
kv_memory.py     the cache, the host blocks, and copies between them
peer_memory.py   the memory that the KV connector reads and writes for peers
"""
