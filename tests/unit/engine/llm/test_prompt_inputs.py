"""Prompts and conversations that are refused."""

from __future__ import annotations

import pytest

from baton_engine import LLM
from support.engine.offline_llm import GREEDY


def test_invalid_prompts_are_refused_with_their_index(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1.*\b600\b"):
        llm.generate([[5], [5] * 600], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        llm.generate([""], GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match="prompt 0 must be a text"):
        llm.generate([3.5], GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match=r"prompt 1 .*a list with bool"):
        llm.generate([[5], [True]], GREEDY, use_tqdm=False)
    with pytest.raises(
        TypeError, match="prompt 0 must have prompt or prompt_token_ids, got 'text'"
    ):
        llm.generate({"text": "hello"}, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompt 0: .*character 2 is half of a surrogate pair"):
        llm.generate("hi\ud800", GREEDY, use_tqdm=False)
    for wrong in (None, 5, b"hello", {"hello"}):
        with pytest.raises(TypeError, match="prompts must be a text, a list"):
            llm.generate(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(
        TypeError, match="sampling_params must be SamplingParams or a list of them, got dict"
    ):
        llm.generate("hello", {"temperature": 0}, use_tqdm=False)
    with pytest.raises(TypeError, match="params must be BeamSearchParams, got SamplingParams"):
        llm.beam_search("hello", GREEDY)
    assert llm.generate("still there", GREEDY, use_tqdm=False)[0].finished


def test_invalid_conversations_are_refused(llm: LLM) -> None:
    user = {"role": "user", "content": "hello"}
    for wrong, kind, message in (
        ("hello", TypeError, "messages must be a list"),
        (user, TypeError, "messages must be a list"),
        ([[user], []], ValueError, "conversation 1 is empty"),
        (["hello"], TypeError, "conversation 0 must be a list of messages"),
    ):
        with pytest.raises(kind, match=message):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="chat_template_kwargs must not set messages"):
        llm.chat([user], GREEDY, use_tqdm=False, chat_template_kwargs={"messages": []})
