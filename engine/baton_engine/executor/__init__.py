"""Executors: how an engine core reaches its workers."""
