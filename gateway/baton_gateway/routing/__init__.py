"""Routing: which engine runs a sequence, and what happens when that engine fails.

Modules:
    discovery: the interface of engine discovery.
    file_discovery: discovery from a JSON file.
    kubernetes_discovery: discovery from pods.
    pool_member: one discovered engine, its state and its load.
    engine_pool: a connection to every discovered engine.
    sequence: one sample of one prompt, with the tokens generated so far.
    retry_state: the attempts of one sequence, and why they failed.
    placer: the choice of the engines for the next attempt.
    prefill_stage: the prefill stage of one attempt.
    dispatcher: runs a sequence: prefill and decode stages, fallback, retry, resume.
"""
