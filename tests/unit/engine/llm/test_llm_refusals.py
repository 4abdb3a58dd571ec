"""Invalid parameters, prompts and conversations, and hostile checkpoints, are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton_engine import LLM, SamplingParams, StructuredOutputsParams
from baton_protocol.process.fatal import ConfigurationError
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind
from support.engine.offline_llm import GREEDY, make_llm, metric
from support.hostile.attack import Attack, parametrize
from support.hostile.configs import CONFIG_ATTACKS
from support.hostile.templates import LOOPS
from support.hostile.tokenizers import DEFAULTS_ATTACKS, TEXT_ATTACKS
from support.hostile.weights import INDEX_ATTACKS


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(n=0), "n must be"),
        (SamplingParams(n=3, best_of=2), "best_of must be at least n=3"),
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(stop=[""]), "stop must not"),
        (SamplingParams(bad_words=[" "]), "bad_words"),
        (SamplingParams(beam_width=2), "beam_search"),
        (
            SamplingParams(structured_output=StructuredOutput(StructuredOutputKind.REGEX, "a")),
            "set structured_outputs",
        ),
        (SamplingParams(stop_token_ids=[5000]), "stop_token_ids"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"])),
            "structured_outputs",
        ),
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "regex"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams()),
            "structured_outputs must have one of",
        ),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(choice="yes")),
            "structured_outputs.choice: .*got str",
        ),
        (
            SamplingParams(structured_outputs={"regex": "a"}),
            "structured_outputs: expected StructuredOutputsParams, got dict",
        ),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(json=print)),
            "structured_outputs: ",
        ),
        (SamplingParams(logprobs=True), "logprobs: expected int"),
        (SamplingParams(top_k=2.5), "top_k: expected int, got float"),
        (SamplingParams(temperature="hot"), "temperature: expected float, got str"),
        (SamplingParams(n=1.5), "n: expected int, got float"),
        (SamplingParams(stop=[5]), r"stop\[0\]: expected str, got int"),
        (SamplingParams(stop={"a"}), "stop: expected a list, got a set"),
        (SamplingParams(bad_words="one"), "bad_words: expected array"),
        (
            SamplingParams(bad_words=["word"] * 600),
            "bad_words must have at most 512 words, got 600",
        ),
        (SamplingParams(logit_bias={"7": 1.0}), "logit_bias: expected int, got str"),
    ],
)
def test_invalid_sampling_params_are_refused_by_name_and_leave_no_request(
    llm: LLM, params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["good", "bad"], [GREEDY, params], use_tqdm=False)
    assert metric(llm, "baton:num_requests_running") == 0
    assert metric(llm, "baton:num_requests_waiting") == 0


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


@parametrize(
    [*INDEX_ATTACKS[::9], *CONFIG_ATTACKS[::16], *TEXT_ATTACKS[::12], *DEFAULTS_ATTACKS[::6]]
)
def test_a_hostile_checkpoint_is_refused_with_the_file_in_the_message(
    checkpoint: Path, tmp_path: Path, attack: Attack
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    attack.apply(path)
    with pytest.raises((ConfigurationError, ValueError)) as caught:
        make_llm(path)
    assert str(path) in str(caught.value)
    assert attack.message in str(caught.value)


def test_a_hostile_chat_template_ends_with_a_reason(llm: LLM) -> None:
    user = {"role": "user", "content": "hello"}
    for template, message in ((LOOPS, "CPU time"), ("{{ 'a' * 10 ** 11 }}", "of memory")):
        with pytest.raises(ValueError, match=message):
            llm.chat([user], GREEDY, use_tqdm=False, chat_template=template)
    assert llm.chat([user], GREEDY, use_tqdm=False)[0].finished
