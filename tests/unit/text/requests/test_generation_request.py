"""OpenAI request structs: defaults, and their sampling parameters."""

from __future__ import annotations

import json

import pytest

from baton_protocol.sampling_params import SamplingParams, StructuredOutput, StructuredOutputKind
from baton_text.chat_messages import template_messages
from baton_text.request_error import RequestError
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.parsing import parse_request, unknown_fields

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: object) -> ChatCompletionRequest:
    return parse_request(json.dumps(CHAT | fields).encode(), ChatCompletionRequest)


def completion(**fields: object) -> CompletionRequest:
    return parse_request(
        json.dumps({"model": "m", "prompt": "p"} | fields).encode(), CompletionRequest
    )


def test_missing_fields_have_the_engines_defaults() -> None:
    assert chat().sampling_params(seed=0, max_tokens=5) == SamplingParams(max_tokens=5)


def test_all_sampling_fields_reach_the_engine() -> None:
    params = chat(
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        min_tokens=2,
        stop_token_ids=[4],
        ignore_eos=True,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
    ).sampling_params(seed=9, max_tokens=5)
    assert params == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=9,
        max_tokens=5,
        min_tokens=2,
        stop_token_ids=[4],
        ignore_eos=True,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.2,
        logit_bias={5: -100.0},
        logprobs=3,
    )


def test_logprobs_of_chats_and_completions() -> None:
    assert chat().requested_logprobs() is None
    assert chat(logprobs=True).requested_logprobs() == 0
    assert completion(logprobs=0).requested_logprobs() == 0
    assert completion().requested_logprobs() is None


def test_max_completion_tokens_takes_precedence_and_completions_default_to_sixteen() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).requested_max_tokens() == 7
    assert chat().requested_max_tokens() is None
    assert completion().requested_max_tokens() == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_of_all_four_shapes(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompts() == expected


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "name": "n", "content": parts}])
    assert template_messages(request.messages) == [{"role": "user", "content": "a\nb", "name": "n"}]


def test_an_error_names_the_field_even_inside_lists() -> None:
    with pytest.raises(RequestError, match="expected str") as caught:
        chat(
            messages=[{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": 5}]}]
        )
    assert caught.value.param == "messages[1].content[0].type"


def test_beam_search_and_structured_outputs_reach_the_engine() -> None:
    beams = completion(n=4, use_beam_search=True, length_penalty=2, early_stopping=True)
    assert beams.sampling_params(seed=0, max_tokens=5) == SamplingParams(
        max_tokens=5, beam_width=4, length_penalty=2.0, early_stopping=True
    )
    words = completion(bad_words=["x"], allowed_token_ids=[4], prompt_logprobs=2, best_of=3)
    assert words.sampling_params(seed=0, max_tokens=5, bad_words_token_ids=[[9]]) == SamplingParams(
        max_tokens=5,
        bad_words_token_ids=[[9]],
        allowed_token_ids=[4],
        prompt_logprobs=2,
        logprobs=0,
    )
    regex = chat(structured_outputs={"regex": "a+"}).sampling_params(seed=0, max_tokens=5)
    assert regex.structured_output == StructuredOutput(StructuredOutputKind.REGEX, "a+")
    assert chat(response_format={"type": "text"}, structured_outputs={}).structured_output() is None


def test_unknown_fields_are_found_by_their_names() -> None:
    body = json.dumps({"model": "m", "\n": 1, "top_k": 2, "topk": [{"top_p": 1}]})
    assert unknown_fields(body.encode(), ChatCompletionRequest) == ["\n", "topk"]
    with pytest.raises(RequestError) as caught:
        unknown_fields(b'{"\xff": 1}', ChatCompletionRequest)
    assert caught.value.code == "invalid_json"


def test_refusals_of_the_engine_name_the_requests_fields() -> None:
    cases = [
        (
            chat(guided_json={}),
            "structured_output.spec is no schema",
            "guided_json is no schema",
            "guided_json",
        ),
        (chat(), "beam_width=9 is more than 8", "n=9 is more than 8", "n"),
        (chat(), "bad_words_token_ids must be short", "bad_words must be short", "bad_words"),
        (
            chat(),
            "repetition_detection.min_count must be in [2, 9]",
            "repetition_detection.min_count must be in [2, 9]",
            "repetition_detection",
        ),
        (chat(), "The queue is odd", "The queue is odd", None),
    ]
    for request, theirs, ours, field in cases:
        error = request.refusal(theirs)
        assert (str(error), error.param) == (ours, field)
