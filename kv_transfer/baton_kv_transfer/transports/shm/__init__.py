"""The transport `shm`: copies between processes of one host, by process_vm_readv.

shm_transport   transfers that this side started
shm_server      the processes that connect, and their requests
cross_memory    reads the memory of another process
"""
