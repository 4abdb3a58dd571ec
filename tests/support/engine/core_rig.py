"""An engine core over a fake executor, and the requests that it runs."""

from __future__ import annotations

from baton_engine.core.engine_core import EngineCore
from baton_protocol.engine_messages import EngineCoreRequest, FinishReason
from baton_protocol.options.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
)
from baton_protocol.sampling_params import SamplingParams
from support.engine.engine_fakes import FakeExecutor


def make_config(**sections: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "model": ModelConfig(path="/nowhere"),
        "cache": CacheConfig(block_size=4, num_blocks=64),
    }
    return EngineConfig(**{**defaults, **sections})  # type: ignore[arg-type]


def make_core(executor_class: type[FakeExecutor] = FakeExecutor, **sections: object) -> EngineCore:
    config = make_config(**sections)
    return EngineCore(config, executor_class(config, "instance", lambda: None))


def request(request_id: str, prompt: list[int], max_tokens: int = 6) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    )


def generate(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[int]]:
    for one in requests:
        assert core.add_request(one) is None
    texts: dict[str, list[int]] = {one.request_id: [] for one in requests}
    while core.has_requests:
        for output in core.step_fn():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            texts[output.request_id] += output.new_token_ids
    return texts
