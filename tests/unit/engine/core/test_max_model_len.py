"""The maximum length of a request."""

from __future__ import annotations

import logging

import pytest

from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.config import (
    CacheConfig,
    ModelConfig,
)
from support.engine.core_rig import make_core


def test_max_model_len_is_fitted_to_the_kv_memory_unless_it_is_configured(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert make_core().ready.max_model_len == 256
    assert "256 tokens, limited by the KV memory; the model's maximum is 512" in caplog.text
    assert make_core(cache=CacheConfig(block_size=4, num_blocks=500)).ready.max_model_len == 512
    long = make_core(
        model=ModelConfig(path="/nowhere", max_model_len=1000),
        cache=CacheConfig(block_size=4, num_blocks=500),
    )
    assert long.ready.max_model_len == 1000, "the workers compare it with the model's maximum"
    with pytest.raises(
        ConfigurationError,
        match=r"model\.max_model_len is 300 .* holds 256 .*raise cache\.memory_bytes",
    ):
        make_core(model=ModelConfig(path="/nowhere", max_model_len=300))
