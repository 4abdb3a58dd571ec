"""The transports of an agent.

choose             the choice of transports by name
transport          the interface of a transport
transport_thread   the thread that all transports of an agent share
mailbox            commands for that thread
transfer           memory regions, transfers and errors
iovec              packed lists of memory runs
ucx/               UCX moves the bytes: TCP, RDMA, host or device memory
tcp/               authenticated TCP sockets, host memory
shm/               copies between processes of one host
sockets/           what tcp and shm share: frames, requests and their replies
"""
