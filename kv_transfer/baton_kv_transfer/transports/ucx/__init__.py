"""The transport `ucx`: every byte is moved by UCX's two-sided tag messages.

lane          the Lane: what both sides ask of each other, failures and the fence
connection    an endpoint of UCX with the requests that depend on it
streams       the tag messages that carry a transfer's data
messages      what the two sides tell each other under the control tag
capabilities  the UCX that was loaded, and whether it can use RDMA
worker        the UCX context and worker (through ucxx), and the calls that ucxx lacks (`library`)
"""
