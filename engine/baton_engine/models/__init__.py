"""Models: Hugging Face checkpoints read into readable modules over `baton_kernels`.

config      config.json as a struct; torch-free
loader      safetensors files: headers, checks, copying into parameters
layers      what the architectures share
llama, qwen3, qwen3_moe    one architecture each
registry    architecture name -> model class
"""
