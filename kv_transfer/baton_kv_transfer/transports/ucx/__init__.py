"""The transport `ucx`: UCX moves every byte, by two-sided tag messages.

ucx_transport   transfers of both sides, failures and the fence
connection      an endpoint of UCX with the requests that depend on it
streams         the tag messages that carry the data of a transfer
messages        requests and replies under the control tag
worker          the UCX context and worker of ucxx, and the calls of libucp that move the bytes
library         ctypes declarations of libucp
capabilities    the UCX that was loaded, and whether it can use RDMA
"""
