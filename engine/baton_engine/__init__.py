"""The inference engine: token ids in, token ids out.

cli                the command `baton-engine`
llm                the offline API, `from baton_engine import LLM, SamplingParams`
server             the engine process: ZMQ, admin HTTP
core               the step: schedule, execute, sample, update
scheduling         chooses the requests of the next step
kv_cache           KV blocks, the prefix cache, swapping and offloading
grammar            structured output
executor           passes steps to the workers
worker             runs a step on a device
models             architectures, layers, weights
compilation        torch.compile and CUDA graphs
expert_parallel    an engine core as a rank of an expert-parallel group
elastic            coordinator of an expert-parallel group
distributed        process groups
random_checkpoint  checkpoints with random weights
fetch              downloads models
metrics            counters, histograms and their Prometheus form
http               small HTTP servers
bounded_log        logs text from untrusted peers on one line, with limited length and rate
wake_pipe          wakes a thread that polls sockets

The names of the offline API are loaded at their first use, so that importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton_engine.llm.async_llm import AsyncLLM
    from baton_engine.llm.llm import LLM
    from baton_engine.llm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from baton_engine.llm.params import BeamSearchParams, SamplingParams
    from baton_protocol.pooling_params import PoolingParams
    from baton_text.requests.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

#: Module of each name of the offline API.
_HOMES = {
    "AsyncLLM": "baton_engine.llm.async_llm",
    "LLM": "baton_engine.llm.llm",
    "BeamSearchOutput": "baton_engine.llm.outputs",
    "BeamSearchSequence": "baton_engine.llm.outputs",
    "CompletionOutput": "baton_engine.llm.outputs",
    "EmbeddingOutput": "baton_engine.llm.outputs",
    "EmbeddingRequestOutput": "baton_engine.llm.outputs",
    "Logprob": "baton_engine.llm.outputs",
    "RequestOutput": "baton_engine.llm.outputs",
    "ScoringOutput": "baton_engine.llm.outputs",
    "ScoringRequestOutput": "baton_engine.llm.outputs",
    "PoolingParams": "baton_protocol.pooling_params",
    "BeamSearchParams": "baton_engine.llm.params",
    "SamplingParams": "baton_engine.llm.params",
    "StructuredOutputsParams": "baton_text.requests.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
