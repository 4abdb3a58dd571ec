"""Validation of requests: a refusal names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_engine.core.request_validation import validate_request
from baton_protocol.engine_messages import EngineCoreRequest, KVSide, KVTransferParams
from baton_protocol.options.config import KVRole
from baton_protocol.pooling_params import NO_SAMPLING, PoolingParams, Task
from baton_protocol.sampling_params import (
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
    StructuredOutputKind,
)

VOCAB_SIZE = 100
CONSUME = KVTransferParams(KVSide.CONSUME, "t", "peer", "127.0.0.1", 5558)
PRODUCE = KVTransferParams(KVSide.PRODUCE, "t", "peer")


def structured(kind: str, spec: str = "") -> dict[str, Any]:
    return {"structured_output": StructuredOutput(StructuredOutputKind(kind), spec)}


def repetition(*args: int) -> dict[str, Any]:
    return {"repetition_detection": RepetitionDetection(*args)}


def check(params: dict[str, Any], **fields: Any) -> None:
    request = EngineCoreRequest(
        "r", fields.pop("prompt_token_ids", [1, 2]), SamplingParams(**params), **fields
    )
    validate_request(request, vocab_size=VOCAB_SIZE, kv_role=KVRole.BOTH)


@pytest.mark.parametrize(
    "params",
    [
        {"prompt_logprobs": 0},
        {"allowed_token_ids": [0, 99]},
        {"bad_words_token_ids": [[3], [4, 5, 6]]},
        repetition(20, 2, 3),
        structured("json_object"),
        structured("json", '{"type": "object"}'),
        structured("choice", '["yes", "no"]'),
        {
            "beam_width": 4,
            "length_penalty": 0.0,
            "early_stopping": True,
            "temperature": 0.0,
            "prompt_logprobs": 1,
        },
    ],
)
def test_valid_sampling_params_are_accepted(params: dict[str, Any]) -> None:
    check(params)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs must be in"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be in"),
        ({"logprobs": 21}, r"^logprobs must be in \[0, 20\], got 21"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        (
            {"allowed_token_ids": [5, 100]},
            r"allowed_token_ids must name token ids in \[0, 100\), got 100",
        ),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids must be words of 1 to"),
        ({"bad_words_token_ids": [[1, -1]]}, "bad_words_token_ids must name token ids"),
        ({"bad_words_token_ids": [[1]] * 2000}, "bad_words_token_ids must have at most 1024"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids must have at most 1024"),
        ({"stop_token_ids": [100]}, "stop_token_ids must name token ids"),
        ({"logit_bias": {100: 1.0}}, "logit_bias must name token ids"),
        (repetition(0), "max_pattern_size"),
        (repetition(257), "max_pattern_size"),
        (repetition(3, 4), r"min_pattern_size must be in \[1, max_pattern_size=3\], got 4"),
        (repetition(3, 0), "min_pattern_size"),
        (repetition(3, 1, 1), "min_count"),
        (structured("json"), "structured_output.spec of kind json must have 1 to"),
        (structured("json_object", "{}"), "structured_output.spec must be empty"),
        (structured("regex", "a" * 200_000), "structured_output.spec"),
        (structured("choice", "yes"), "structured_output.spec must be a JSON list"),
        (structured("choice", "[1]"), "structured_output.spec must be a JSON list"),
        (structured("choice", "[]"), "one or more non-empty"),
        (structured("choice", '["a", ""]'), "one or more non-empty"),
        ({"beam_width": -1}, "beam_width must be in"),
        ({"beam_width": 65}, "beam_width must be in"),
        ({"length_penalty": float("nan")}, "length_penalty must be in"),
        ({"length_penalty": 11.0}, "length_penalty must be in"),
        ({"beam_width": 2, **repetition(3)}, "repetition_detection.*beam_width"),
        ({"beam_width": 2, "return_routed_experts": True}, "return_routed_experts.*beam_width"),
        (
            {
                "beam_width": 2,
                "structured_output": StructuredOutput(StructuredOutputKind.REGEX, "a"),
            },
            "structured_output.*beam_width",
        ),
    ],
)
def test_invalid_sampling_params_are_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field) as refused:
        check(params)
    # The gateway maps this name to the field of the client's request.
    assert str(refused.value).startswith(tuple(SamplingParams.__struct_fields__))


@pytest.mark.parametrize(
    ("params", "fields", "reason"),
    [
        ({}, {"prompt_token_ids": [100]}, "prompt_token_ids must be in"),
        ({}, {"group_id": "g" * 300}, "group_id must have at most"),
        ({}, {"group_id": "g", "generated_token_ids": [1]}, "generated_token_ids.*group_id"),
        ({}, {"group_id": "g", "kv_transfer": PRODUCE}, "kv_transfer PRODUCE.*group_id"),
        ({"beam_width": 2}, {"kv_transfer": CONSUME}, "kv_transfer.*beam_width"),
        ({"beam_width": 2}, {"kv_transfer": PRODUCE}, "kv_transfer.*beam_width"),
        ({"beam_width": 2}, {"generated_token_ids": [1]}, "generated_token_ids.*beam_width"),
        ({"beam_width": 2}, {"group_id": "g"}, "group_id.*beam_width"),
        ({"beam_width": 2}, {"sample_index": 1}, "sample_index.*beam_width"),
        ({"beam_width": 2, **structured("json_object")}, {}, "structured_output.*beam_width"),
        ({"prompt_logprobs": 1}, {"kv_transfer": CONSUME}, "prompt_logprobs.*CONSUME"),
    ],
)
def test_invalid_combinations_are_refused(
    params: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check(params, **fields)


def test_a_group_member_can_load_its_prompt() -> None:
    check({}, group_id="g", kv_transfer=CONSUME)


def test_group_members_and_prefill_requests_can_have_prompt_logprobs() -> None:
    check({"prompt_logprobs": 1}, group_id="g", sample_index=3)
    check({"prompt_logprobs": 1, "max_tokens": 1}, kv_transfer=PRODUCE)


POOLED = EngineCoreRequest("r", [1, 2], NO_SAMPLING, pooling_params=PoolingParams())


@pytest.mark.parametrize(
    ("changes", "task", "message"),
    [
        ({}, Task.GENERATE, "generates text .*: it takes no requests with pooling_params"),
        ({"pooling_params": None}, Task.EMBED, "pools prompts .*: it takes only requests with"),
        ({"pooling_params": PoolingParams(dimensions=0)}, Task.EMBED, r"dimensions .* \[1, 8\]"),
        ({"pooling_params": PoolingParams(dimensions=9)}, Task.EMBED, r"dimensions .* \[1, 8\]"),
        ({"pooling_params": PoolingParams(dimensions=1)}, Task.CLASSIFY, "are for embeddings"),
        ({"pooling_params": PoolingParams(normalize=True)}, Task.CLASSIFY, "are for embeddings"),
        (
            {"pooling_params": PoolingParams(second_text_start=-1)},
            Task.CLASSIFY,
            "second_text_start must not be negative",
        ),
        ({"sampling_params": SamplingParams(max_tokens=2)}, Task.EMBED, "NO_SAMPLING"),
        ({"generated_token_ids": [1]}, Task.EMBED, "used up|generated_token_ids"),
        ({"group_id": "g"}, Task.EMBED, "group_id"),
    ],
)
def test_requests_for_another_task_are_refused(
    changes: dict[str, Any], task: Task, message: str
) -> None:
    def check_pooled(request: EngineCoreRequest, task: Task) -> None:
        validate_request(
            request, vocab_size=VOCAB_SIZE, kv_role=KVRole.NONE, task=task, vector_size=8
        )

    check_pooled(POOLED, Task.EMBED)
    check_pooled(POOLED, Task.CLASSIFY)
    with pytest.raises(ValueError, match=message):
        check_pooled(msgspec.structs.replace(POOLED, **changes), task)
