"""Sampling parameters that are refused."""

from __future__ import annotations

import pytest

from baton_engine import LLM, SamplingParams, StructuredOutputsParams
from baton_protocol.sampling_params import StructuredOutput, StructuredOutputKind
from support.engine.offline_llm import GREEDY, metric


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
