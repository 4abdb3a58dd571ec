"""Helpers of several test suites: the reference model and its tie rule, waiting, processes."""
