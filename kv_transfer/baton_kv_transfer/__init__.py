"""Transfer of KV blocks between engines. This package does not import the engine.

A producer is an engine that computes prompts (prefill). A consumer is an engine that loads the
blocks of a prompt (decode).

connector            the interface between the engine and this package, and its data
transfer_connector   the implementation: one thread runs the consumer side and the producer side
connector_context    the state that the consumer side and the producer side share
side_channel         the messages between a consumer and a producer
auth                 the proof of the service's token in the handshake
consumer/            loads blocks from producers and verifies them
producer/            publishes blocks to consumers, or writes blocks into their memory
agent/               registered memory and one-sided transfers, with NIXL's vocabulary
memory/              a worker's KV memory as peers see it, its layout, and checksums of blocks
transports/          UCX, TCP and shared memory
"""
