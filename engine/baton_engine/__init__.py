"""The engine: token ids in, token ids out. `protocol` and `text` are torch-free; everything else may import torch."""
