"""How models of each family write their reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts around the reasoning in a model's replies.

    Args:
        start: precedes the reasoning.
        end: follows the reasoning.
        next: stands between `end` and the content, such as a line break.
        may_repeat: reasoning may also follow content.
    """

    start: str
    end: str
    next: str = ""
    may_repeat: bool = False


#: By the name that `reasoningParser` takes.
REASONING_FORMATS = {
    "gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", may_repeat=True
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "think": ReasoningFormat("<think>", "</think>"),
}
