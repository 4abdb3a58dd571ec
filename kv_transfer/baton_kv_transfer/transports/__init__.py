"""The transports of an agent.

choose             the choice of transports by name
transport          the interface of a transport
transport_thread   the thread that all transports of an agent share
work_loan          whether the thread does its work, or a user that waits
mailbox            commands for that thread
alarm              a timer as a descriptor, for that loan
transfer           memory regions, transfers and errors
iovec              packed lists of memory runs
ucx/               UCX over TCP or RDMA, host or device memory; worker.py moves the bytes
tcp/               authenticated TCP sockets, host memory; sockets/rows.py moves the bytes
shm/               between processes of one host; cross_memory.py moves the bytes
sockets/           the rows of tcp; connections, requests and replies of tcp and shm

The transport `nixl` is an agent of its own: agent/nixl_agent.py.
"""
