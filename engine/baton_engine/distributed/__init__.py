"""Process groups of ranks, and the store through which ranks find each other.

group.py                the interface: rank, size, operations on tensors
process_group.py        groups over gloo and NCCL
shared_memory_group.py  groups of CPU ranks on one host
gloo_connections.py     the TCP connections of a gloo group
row_bytes.py            converts an all-to-all of rows to an all-to-all of bytes
group_errors.py         GroupBrokenError, without torch
store/                  the rendezvous store
"""
