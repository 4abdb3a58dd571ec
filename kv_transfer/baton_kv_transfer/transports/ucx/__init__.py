"""The transport `ucx`: every byte is moved by UCX's two-sided tag messages.

worker        the UCX context and worker (through ucxx), and the calls that ucxx lacks (`library`)
messages      what the two sides tell each other under the control tag
streams       the tag messages that carry a transfer's data
connections   endpoints, requests of peers, failures and the fence
transport     the `Transport`, for any thread
"""
