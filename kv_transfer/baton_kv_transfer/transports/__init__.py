"""The transports of an agent.

choose             chooses transports by name
transport          the interface of a transport
transport_thread   the thread that all transports of an agent share
work_loan          lends the work of that thread to a user of the agent that waits
mailbox            queues commands for that thread
alarm              a timer with a file descriptor, for work_loan
transfer           memory regions, transfers and errors
iovec              packed lists of memory runs
ucx/               UCX over TCP or RDMA, host or device memory; worker.py moves the bytes
tcp/               authenticated TCP sockets, host memory; sockets/rows.py moves the bytes
shm/               between processes of one host; cross_memory.py moves the bytes
sockets/           the rows of tcp; connections, requests and replies of tcp and shm

The transport `nixl` is an agent of its own: agent/nixl_agent.py.
"""
