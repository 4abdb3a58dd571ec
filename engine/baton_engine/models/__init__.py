"""Models: Hugging Face checkpoints as torch modules over `baton_kernels`.

architectures/        one file per architecture
factory.py            builds a model and loads its weights
registry.py           architecture name -> model class
fused_layers.py       the layers of a dense model as one compiled operation
layers.py             layers that the architectures share, up to `CausalLM`
sparse_moe.py         mixture of experts as a layer
expert_parallel.py    exchange of tokens with the experts of other ranks
projections.py        linear layers over tensor ranks
operators.py          attention, sums and experts as operators of a traced graph
forward_context.py    the step's data for attention
rope.py               rotary frequencies and their scalings
loader.py             safetensors files: headers, checks, copies into parameters
sharding.py           the part of a model, and of each tensor, that one rank holds
checkpoint_config.py  config.json as a struct; torch-free
errors.py             why a checkpoint cannot be served
"""
