"""The transport `shm`: copies between processes of one host. `cross_memory` moves every byte, by process_vm_readv.

lane            transfers that this side began
clients         processes that connected, and what they ask for
cross_memory    reading another process's memory
"""
