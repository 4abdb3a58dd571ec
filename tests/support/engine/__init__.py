"""Fakes, processes and drivers for tests of the engine."""
