"""Models: Hugging Face checkpoints read into readable modules over `baton_kernels`.

config          config.json as a struct; torch-free
sharding        what of a model, and of each tensor, one rank holds
layers          what the architectures share, up to `CausalLM`
rope            rotary frequencies and their scalings
architectures/  one file per architecture
registry        architecture name -> model class; `load_model`
loader          safetensors files: headers, checks, copying slices into parameters
"""
