"""The transports of an agent.

transport_selection  chooses transports by name
transport            the interface of a transport
transport_thread     the thread that all transports of an agent share
progress_handoff     lets a thread that waits for the agent do the work of the transports' thread
command_queue        queues calls for the transports' thread
timer_fd             a timer with a file descriptor, for progress_handoff
transfer             memory regions, transfers and errors
iovec                packed lists of memory runs
ucx/                 UCX over TCP or RDMA, host or device memory; ucx_worker.py moves the bytes
tcp/                 authenticated TCP sockets, host memory; sockets/row_io.py moves the bytes
shm/                 between processes of one host; cross_memory.py moves the bytes
sockets/             what tcp and shm share: connections, requests and replies

The transport `nixl` is an agent of its own: agent/nixl_agent.py.
"""
