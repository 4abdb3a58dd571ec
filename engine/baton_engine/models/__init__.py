"""Torch modules that run Hugging Face checkpoints with the operations of `baton_kernels`.

architectures/        one file per architecture
factory.py            builds a model and loads the weights
registry.py           the model class of each architecture name
fused_layers.py       embedding, layers and norm of a model as one compiled operation
layers.py             layers that the architectures share, and the base class `CausalLM`
classifier.py         the output of pooling models that score texts
sparse_moe.py         the mixture-of-experts layer
expert_shard.py       the experts of a layer on one rank, and the exchange of tokens
projections.py        linear layers over tensor ranks
operators.py          attention, all-reduce and experts as operators of a traced graph
forward_context.py    data of one step that attention reads
rope.py               rotary frequencies and their scalings
checkpoint/           reads config.json and the weights of one rank
errors.py             errors for checkpoints that cannot be served
"""
