"""Runs steps on one rank: the model runner, the batch, the KV memory and the sampler.

worker.py            the methods that an executor calls by name
model_runner.py      one step on one device, from request ids to sampled tokens
model_spec.py        checkpoint, dtype, KV layout and compatibility hash of one rank
loaded_model.py      the weights of one rank: load, move to the host, drop, restore
memory_profiling.py  measures how many KV blocks fit in the memory of one rank
sleep.py             releases weights and KV memory, and restores them
input_batch.py       the persistent batch and the tensors of a step
pipeline_stage.py    exchange of hidden states and routed experts with adjacent stages
optional_outputs.py  prompt log-probabilities and routed experts of a step
pooler.py            the vector of each prompt, in a pooling model
packed_weights.py    weights packed or quantized for a CPU
devices.py           the device and the dtype
kv_role_checks.py    refuses settings with which workers cannot exchange KV blocks
profiler.py          torch's profiler
forward/             runs the forward by captured graph, by compiled pieces or layer by layer
sampling/            logits processing, sampling, log-probabilities
memory/              number of KV blocks, KV memory, the memory that peers access
experts/             expert parallelism; an engine without it never imports this package
"""
