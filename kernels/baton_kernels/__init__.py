"""Tensor operations of the models. GPUs run Triton. CPUs run C++ if it is compiled, else torch.

Each operation has a folder. Most folders have these files:

    __init__.py       formula, shapes, counted cost, and the choice of the implementation
    reference.py      the plain implementation with which tests compare all other implementations
    triton_kernel.py  the Triton implementation, imported when the first GPU tensor arrives
    torch_cpu.py      a faster torch implementation for CPUs, if the reference is too slow

The counted cost is the number of bytes and operations that the formula needs, from which benchmarks
compute GB/s and TFLOP/s. `decoder_layers` has no counted cost and no reference: tests compare it
with the layers one by one.

The operations, and the modules that they share:

    attention              paged attention over the KV cache, prefill and decode in one call
    block_checksum         word sums of KV blocks, by which a transfer is verified
    block_copy             copies of whole KV blocks, on the device and between device and host
    kv_write               writes of new keys and values into their cache slots
    sampling               the most likely token, or a random draw after min_p, top_k and top_p
    norm                   RMS normalization, with or without a residual
    rope                   rotary position embedding
    activation             gated activations of MLPs
    moe                    routing of tokens to experts, and the experts' MLPs
    linear                 linear layers, on a CPU with packed or quantized weights
    decoder_layers         token ids to hidden states in one call, on a CPU
    kernel_arguments       pointers and strides that Triton kernels take as arguments
    cpu                    the compiled C++ operations
    launch_configurations  launch configurations, measured per GPU
"""
