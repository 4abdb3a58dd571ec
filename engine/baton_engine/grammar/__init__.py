"""Structured output. No torch.

structured_output   compiled grammars and the tokens that they allow next
"""
