"""Helpers for the tests of pocketkube."""
