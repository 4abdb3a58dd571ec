"""How models of each family write their reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts before and after the reasoning."""

    start: str
    end: str


#: By the name that `reasoningParser` takes. The parser of `gptoss` also has its own tool calls.
REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
