"""Scheduling: decides which requests run in the next step. Does not import torch.

scheduler          `schedule()` builds a step: running requests continue, and others join the batch
decisions          the decisions that the other modules return
request_lifecycle  applies decisions: queues, starts, preempts, swaps and ends requests
prompt_chunks      how many tokens of a prompt one step computes
prompt_budget      how many prompt tokens may run beside decodes, for short times between tokens
batch_admission    which waiting request joins the batch, or starts to load its KV
preemption         which request loses its KV blocks, and which swapped request gets blocks back
step               a step under construction, what the worker has of each request, and results
handoff            requests whose prompt a peer computes, or whose KV a peer reads
sequence_groups    samples of one prompt, and beam search
grammar_queue      compiles grammars, and holds requests that wait for a grammar
stop_rules         when a request ends
request_limits     which requests are refused
scheduler_state    all requests, their queues, and what else the modules share
request            a request as plain data
queues             waiting and running requests, in order
request_outputs    collects outputs for clients
"""
