"""Attacks by hostile checkpoints, for the tests of all readers of checkpoints."""
