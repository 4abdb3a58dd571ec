"""KV blocks between the memories of engines. The engine imports this package, never the reverse.

connector            the interface between the engine and this package, and its data
transfer_connector   the implementation: one thread runs both sides over one agent
context              what both sides of a connector share
side_channel         the messages between a consumer and a producer
auth                 the proof of the service's token in the handshake
consumer/            loads blocks from producers and verifies them
producer/            publishes blocks to consumers, or writes them there
agent/               registered memory and one-sided transfers, with NIXL's vocabulary
memory/              a worker's KV memory as peers see it, layouts and checksums
transports/          UCX, TCP and shared memory
"""
