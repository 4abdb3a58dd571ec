"""Scheduling: decides which requests run in the next step. No torch.

scheduler        `schedule()` asks the others in order
decisions        the values that the others return
lifecycle        applies them: queues, starts, preempts, swaps and ends requests
planner          how many tokens each running request gets
admission        which waiting request joins the batch, or starts to load its KV
preemption       which running request loses its memory, and which swapped one gets it back
step_results     what follows from a step's tokens
handoff          requests whose prompt a peer computes, or whose KV a peer reads
groups           samples of one prompt, and beam search
grammar_queue    requests that wait for their grammar
stop_rules       when a request ends
refusals         requests that are not accepted
state            all requests, their queues, and what the parts share
request          a request as plain data
queues           waiting and running requests, in order
step_builder     a step under construction
worker_mirror    what the worker has, so that a step carries only changes
request_outputs  outputs for clients
"""
