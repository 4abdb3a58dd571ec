"""Tensor operations of the models: Triton on a GPU; on a CPU compiled C++ if present, else torch.

Each operation has a folder:

    __init__.py       formula, shapes, counted cost, and the choice of the implementation
    reference.py      the plain implementation that tests compare with
    triton_kernel.py  imported when the first GPU tensor arrives
    torch_cpu.py      torch on a CPU, where the reference is too slow

    attention         paged attention over the KV cache, prefill and decode in one call
    block_checksum    word sums of KV blocks, with which a transfer is verified
    block_copy        copies of whole KV blocks, on the device and between device and host
    kv_write          writes of new keys and values into their cache slots
    sampling          the most likely token, or a draw from what top_k, top_p and min_p keep
    norm              RMS normalisation, with or without a residual
    rope              rotary position embedding
    activation        gated activations of MLPs
    moe               routing to experts, and the experts
    linear            linear layers with packed or int8 weights on a CPU
    decoder_layers    all dense layers of a step in one call, on a CPU
    configurations    launch configurations, measured per GPU
    kernel_arguments  arguments that several launches pass: pointers and strides
    cpu               the compiled C++ operations
"""
