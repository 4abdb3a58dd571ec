"""Expert parallelism on a worker.

A generation is a fixed set of ranks with a placement of experts on these ranks. An engine without
expert parallelism never imports this package.

config_checks.py    refuses settings that are incompatible with expert parallelism
preparation.py      the state of a generation that is being prepared
generations.py      the current generation, and the next generation that is being prepared
expert_exchange.py  sends experts between ranks
expert_weights.py   weights of single experts: in memory, in the checkpoint, as messages
expert_steps.py     steps with tokens, dummy batches, and broken expert groups
"""
