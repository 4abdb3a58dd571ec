"""Helpers that only the integration tests use."""
