"""Attacks by hostile checkpoints, for the tests of everything that reads a checkpoint."""
