"""Fakes, processes and drivers for tests of the engine.

- `ranks`: ranks of one group as threads, as processes or under torchrun.
- `scheduling`: a scheduler with a fake model, and the client that checks its outputs.
"""
