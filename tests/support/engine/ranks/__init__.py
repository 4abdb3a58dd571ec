"""Ranks of one group as threads, as processes or under torchrun."""
