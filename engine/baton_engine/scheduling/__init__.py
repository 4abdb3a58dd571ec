"""Which requests run in the next step: admission, preemption, prompt chunks, sample groups, beam searches. No torch.

scheduler        `schedule()` asks the others in order and applies what they decide; `update_from_output()` takes results in
decisions        what they decide: values, applied by the scheduler alone
admission        which waiting request joins the batch, or starts to load its KV
planner          how many tokens each running request gets
preemption       which running request loses its memory, and which swapped one gets it back
results          what a step's tokens mean: more tokens, the end of a request, the next step of a beam search
remote_prefill   when a request whose prompt was computed elsewhere goes on
request          a request, plain data
"""
