"""The transport `shm`: copies between processes of one host, by process_vm_readv.

lane            the Lane: transfers of this side
clients         processes that connected, and what they ask for
cross_memory    reading another process's memory
messages        what the two sides tell each other
"""
