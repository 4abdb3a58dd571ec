"""Moves KV blocks between the memories of engines. Knows the wire protocol of the engine, never the engine."""

from baton_kv_transfer.factory import create_connector

__all__ = ["create_connector"]
