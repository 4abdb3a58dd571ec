"""Samples tokens from logits.

logits_processing.py  bias, penalties and masks
sampler.py            one token per row, as a pure function
sampled_tokens.py     the tokens of a step, which may still be on their way to the host
logprobs.py           the log-probabilities to report
"""
