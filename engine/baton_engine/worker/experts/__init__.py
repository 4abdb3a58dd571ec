"""The rank's side of expert parallelism.

An engine without expert parallelism never imports this package.

config_checks.py    configurations that exclude expert parallelism
preparation.py      the state of a generation that is being prepared
generations.py      the generation that serves and the one prepared beside it
expert_exchange.py  sends experts between ranks
expert_weights.py   weights of single experts: in memory, in the checkpoint, as messages
expert_steps.py     dummy batches and broken expert groups
"""
