"""KV hand-off between a prefill engine and a decode engine, as the scheduler sees it.

kv_handoff       which blocks to offer, publish, load and free
remote_prefill   when a request continues whose prompt a peer has computed
"""
