"""Samples tokens from logits.

logits_processing.py  bias, penalties and masks
sampler.py            one token per row, as a pure function
logprobs.py           the log-probabilities to report
"""
