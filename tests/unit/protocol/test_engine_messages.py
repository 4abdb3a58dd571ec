"""Messages between gateways and engines: encoding, defaults of newer fields, message types."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.engine_messages import (
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineCoreResponseType,
)
from baton_protocol.sampling_params import SamplingParams

TOKENS = st.lists(st.integers(0, 200_000), max_size=70)


@given(TOKENS, TOKENS, st.integers(0, 2**64 - 1))
def test_requests_are_unchanged_by_encoding_and_decoding(prompt, generated, seed) -> None:
    request = EngineCoreRequest(
        "r", prompt, SamplingParams(seed=seed, logit_bias={3: 1.5}), generated, sample_index=2
    )
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest) == request
    )


def test_a_request_from_an_older_peer_gets_the_defaults_of_newer_fields() -> None:
    request = EngineCoreRequest("r", [1], SamplingParams())
    short = msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(request))[:3])
    assert msgspec.msgpack.decode(short, type=EngineCoreRequest) == request


def test_message_types_are_one_byte_and_distinct() -> None:
    for kinds in (EngineCoreRequestType, EngineCoreResponseType):
        values = [kind.value for kind in kinds]
        assert len(set(values)) == len(values)
        assert {len(value) for value in values} == {1}
