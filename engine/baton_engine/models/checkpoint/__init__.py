"""Reads a checkpoint: its configuration, and the weights that one rank holds.

checkpoint_config.py  config.json as a struct, without torch
pooling_config.py     whether and how a checkpoint pools, from its other files
sharding.py           the layers, heads and tensor slices that one rank holds
loader.py             reads and checks safetensors files, and fills parameters
"""
