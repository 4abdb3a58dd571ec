"""Structured output. Does not import torch.

structured_output  the grammars of requests, and the tokens that they allow next
sandboxed_compile  compiles untrusted specifications in a child process first
compiler           compiles specifications with `llguidance`
"""
