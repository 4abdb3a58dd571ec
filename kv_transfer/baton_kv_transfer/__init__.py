"""Moves KV blocks between the memories of engines. Knows the wire protocol of the engine, never the engine."""
