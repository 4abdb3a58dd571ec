"""Helpers of several test suites: the reference model, waiting, and processes."""
