"""The transport `ucx`: UCX moves every byte, by two-sided tag messages.

lane          transfers of both sides, failures and the fence
connection    an endpoint of UCX with the requests that depend on it
streams       the tag messages that carry a transfer's data
messages      requests and answers under the control tag
capabilities  the UCX that was loaded, and whether it can use RDMA
worker        the UCX context and worker (through ucxx), and the calls that ucxx lacks (`library`)
"""
