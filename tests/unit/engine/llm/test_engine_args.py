"""The keyword arguments of `LLM` are options of the engine's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import get_args, get_type_hints

import pytest

from baton_engine.llm.engine_args import EngineArgs, engine_config
from baton_protocol.options.config import EngineConfig
from baton_protocol.options.option import Option, options


def is_for_servers(path: str) -> bool:
    """Return whether an option concerns clients, peers or a group, which `LLM` does not have."""
    return path.startswith("kv_transfer.") or path in {
        "model.path",  # the positional argument
        "model.served_name",
        "cache.enable_kv_events",
        "scheduler.max_queue",
        "parallel.enable_expert_parallel",
        "parallel.coordinator",
        "parallel.rank_name",
        "parallel.num_redundant_experts",
        "engine_port",
        "http_port",
        "service_key_file",
        "drain_timeout_s",
    }


def argument_type(option: Option) -> object:
    """Return the type of an option's argument. None leaves the default, so it needs no mention."""
    kinds = get_args(option.type)
    kind = kinds[0] if NoneType in kinds else option.type
    return {tuple[int, ...]: Sequence[int], tuple[str, ...]: Sequence[str]}.get(kind, kind)


def test_the_arguments_are_the_options_that_are_not_for_servers_with_their_types() -> None:
    assert get_type_hints(EngineArgs) == {
        option.flag.removeprefix("--").replace("-", "_"): argument_type(option)
        for option in options(EngineConfig)
        if not is_for_servers(option.path)
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"watermark": 1.5}, r"watermark must be in \[0, 1\), got 1.5"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
        ({"kv_cache_memory_bytes": "much"}, "kv_cache_memory_bytes"),
        ({"capture_sizes": [1, 600]}, r"capture_sizes .* max_num_batched_tokens=512"),
    ],
)
def test_the_error_about_an_invalid_argument_names_it(args, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config("/m", args)


def test_arguments_set_their_fields_of_the_configuration() -> None:
    config = engine_config("/m", {"executor": "ray", "capture_sizes": [1, 2], "num_blocks": None})
    assert config.parallel.executor_class == "ray"
    assert config.compilation.capture_sizes == (1, 2)
    assert config.cache.num_blocks is None
