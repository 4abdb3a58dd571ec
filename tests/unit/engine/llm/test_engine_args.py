"""The keyword arguments of `LLM` are options of the engine's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import get_args, get_type_hints

import pytest

from baton_engine.llm.engine_args import EngineArgs, engine_config
from baton_protocol.config import EngineConfig
from baton_protocol.options import options


@pytest.mark.parametrize("name", EngineArgs.__annotations__)
def test_each_argument_has_the_name_and_the_type_of_a_flag(name):
    flag = "--" + name.replace("_", "-")
    [option] = [option for option in options(EngineConfig) if option.flag == flag]
    kinds = get_args(option.type)
    kind = kinds[0] if NoneType in kinds else option.type
    expected = Sequence[int] if kind == tuple[int, ...] else kind
    assert get_type_hints(EngineArgs)[name] == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"watermark": 1.5}, r"watermark must be in \[0, 1\), got 1.5"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
        ({"kv_cache_memory_bytes": "much"}, "kv_cache_memory_bytes"),
    ],
)
def test_the_error_about_an_invalid_argument_names_it(args, message):
    with pytest.raises(ValueError, match=message):
        engine_config("/m", args)


def test_arguments_set_their_fields_of_the_configuration():
    config = engine_config("/m", {"executor": "ray", "capture_sizes": [1, 2], "num_blocks": None})
    assert config.parallel.executor_class == "ray"
    assert config.compilation.capture_sizes == (1, 2)
    assert config.cache.num_blocks is None
