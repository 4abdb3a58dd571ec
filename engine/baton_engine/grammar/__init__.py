"""Structured output. Does not import torch.

structured_output   compiles grammars and computes the tokens that they allow next
"""
