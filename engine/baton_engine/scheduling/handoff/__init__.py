"""The scheduler's side of the KV hand-off from a prefill engine to a decode engine.

kv_handoff       which blocks to offer, publish, load and free
remote_prefill   when a request can continue after a peer has computed its prompt
"""
