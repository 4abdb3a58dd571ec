"""KV hand-off between a prefill engine and a decode engine, as the scheduler sees it.

kv_handoff       which blocks to offer, publish, load and free
remote_prefill   when a request can continue after a peer has computed its prompt
"""
