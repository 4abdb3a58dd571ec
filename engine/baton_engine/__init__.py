"""The engine: token ids in, token ids out. `protocol` and `text` are torch-free; everything else may import torch.

The offline API is here by name: `from baton_engine import LLM, SamplingParams`. It is loaded when it is first used, so that
importing this package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton_engine.llm.llm import LLM
    from baton_engine.llm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestOutput,
    )
    from baton_engine.llm.params import BeamSearchParams, SamplingParams
    from baton_text.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "llm.llm",
    "BeamSearchOutput": "llm.outputs",
    "BeamSearchSequence": "llm.outputs",
    "CompletionOutput": "llm.outputs",
    "Logprob": "llm.outputs",
    "RequestOutput": "llm.outputs",
    "BeamSearchParams": "llm.params",
    "SamplingParams": "llm.params",
    "StructuredOutputsParams": "text.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
