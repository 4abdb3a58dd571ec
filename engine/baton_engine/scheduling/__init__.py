"""Scheduling: decides which requests run in the next step. No torch.

scheduler        `schedule()` asks the others in order and applies their decisions;
`update_from_output()` takes in results
decisions        the values that the others return, applied by the scheduler alone
admission        which waiting request joins the batch, or starts to load its KV
planner          how many tokens each running request gets
preemption       which running request loses its memory, and which swapped one gets it back
results          what follows from a step's tokens: an output, the end of a request, the next
step of a beam search
remote_prefill   when a request continues whose prompt a peer has computed
request          a request as plain data
"""
