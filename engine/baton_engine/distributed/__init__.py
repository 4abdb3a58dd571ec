"""Ranks of one engine: who they are, and the process groups in which they exchange tensors."""
