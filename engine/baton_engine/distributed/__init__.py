"""Process groups of ranks, and the store in which ranks find each other.

group.py                the interface: rank, size, operations on tensors
process_group.py        groups over gloo and NCCL
shared_memory_group.py  groups of CPU ranks on one host
gloo_connections.py     the TCP connections of a gloo group
rows.py                 an all-to-all of rows as one of bytes
group_errors.py         GroupBrokenError, without torch
store/                  the rendezvous store
"""
