"""A sequence: the engine requests that continue it, and when a prefill engine may start it."""

from __future__ import annotations

from typing import Any

import pytest

from baton_gateway.routing.sequence import Sequence
from baton_protocol.engine_messages import KVSide, KVTransferParams
from baton_protocol.pooling_params import PoolingParams
from baton_protocol.sampling_params import SamplingParams


def sequence(generated: list[int] | None = None, **params: Any) -> Sequence:
    return Sequence(
        "r", [1, 2, 3], SamplingParams(**params), generated_token_ids=list(generated or [])
    )


def test_a_request_continues_after_the_generated_tokens() -> None:
    resumed = sequence([7, 8], max_tokens=9, min_tokens=5, prompt_logprobs=2)
    request = resumed.request("r-1", None, group_id="g")
    assert (request.request_id, request.group_id) == ("r-1", "g")
    assert (request.prompt_token_ids, request.generated_token_ids) == ([1, 2, 3], [7, 8])
    assert request.sampling_params.max_tokens == 9
    assert request.sampling_params.prompt_logprobs is None  # sent with the first token
    assert sequence(prompt_logprobs=2).request("r", None).sampling_params.prompt_logprobs == 2
    resumed.generated_token_ids.append(9)
    assert request.generated_token_ids == [7, 8]


def test_a_prefill_engine_samples_one_token() -> None:
    params = (
        sequence(max_tokens=9, min_tokens=5)
        .request("r", KVTransferParams(KVSide.PRODUCE, "t", "C"))
        .sampling_params
    )
    assert (params.max_tokens, params.min_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("one", "is_possible"),
    [
        (sequence(), True),
        (sequence([7]), False),
        (sequence(beam_width=2), False),
        (sequence(prompt_logprobs=0), False),
        (Sequence("r", [1], SamplingParams(), pooling_params=PoolingParams()), False),
    ],
)
def test_a_prefill_engine_starts_only_new_sequences_without_prompt_reports(
    one: Sequence, is_possible: bool
) -> None:
    assert one.can_prefill_remotely == is_possible


def test_a_sequence_is_complete_with_max_tokens() -> None:
    assert sequence([7, 8], max_tokens=2).is_complete
    assert not sequence([7], max_tokens=2).is_complete
    assert not sequence([7], max_tokens=None).is_complete
