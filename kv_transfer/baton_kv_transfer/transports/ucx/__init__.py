"""The transport `ucx`: UCX moves every byte, by two-sided tag messages.

ucx_transport   transfers of both sides, failures and the fence
connection      a UCX endpoint and the requests that use it
data_messages   the tag messages that carry the data of a transfer
messages        requests and replies under the control tag
ucx_worker      UCX's context and worker (from ucxx), and the libucp calls that move the bytes
library         ctypes declarations of libucp
capabilities    the version, files and components of the loaded UCX
"""
