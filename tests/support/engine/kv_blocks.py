"""Requests that hold blocks of a small KV cache.

For the tests of the KV cache manager and of its block pool.
"""

from __future__ import annotations

from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.request import Request
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.sampling_params import SamplingParams

BLOCK = 4


def make_request(tokens: list[int], salt: str = "") -> Request:
    return Request(EngineCoreRequest("r", tokens, SamplingParams(), cache_salt=salt))


def manager(num_blocks: int = 8, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, "model", enable_prefix_caching=enable_prefix_caching)


def run(kv: KVCacheManager, tokens: list[int], salt: str = "") -> Request:
    """Return a computed request that holds its blocks."""
    request = make_request(tokens, salt)
    assert kv.allocate(request, len(tokens))
    kv.cache_blocks(request, len(tokens))
    return request
