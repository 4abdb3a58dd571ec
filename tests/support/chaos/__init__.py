"""Processes and pairs of engines for the chaos tests."""
