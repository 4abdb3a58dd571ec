"""Wire structs, block hashes and configuration that both sides of a connection share."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.block_hash import hash_block, root_hash
from baton_protocol.engine_messages import (
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineCoreResponseType,
)
from baton_protocol.options.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    compatibility_hash,
    container_path,
)
from baton_protocol.sampling_params import SamplingParams
from support.engine.scheduling.block_hashes import hash_blocks

TOKENS = st.lists(st.integers(0, 200_000), max_size=70)


@given(TOKENS, TOKENS, st.integers(1, 20))
def test_equal_block_hashes_mean_equal_prefixes(a, b, block_size) -> None:
    root = root_hash("model")
    for i, (x, y) in enumerate(
        zip(hash_blocks(root, a, block_size), hash_blocks(root, b, block_size), strict=False)
    ):
        end = (i + 1) * block_size
        assert (x == y) == (a[:end] == b[:end])


def test_only_full_blocks_are_hashed_and_the_partial_one_differs_from_the_full() -> None:
    root = root_hash("model")
    assert len(hash_blocks(root, list(range(47)), 16)) == 2
    assert hash_block(root, [1, 2]) != hash_block(root, [1, 2, 0])


def test_model_and_salt_separate_caches() -> None:
    roots = {root_hash("a"), root_hash("b"), root_hash("a", "salt"), root_hash("as", "alt")}
    assert len(roots) == 4


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


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_invalid_sampling_params_are_refused_with_the_fields_name(params, field) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**params).validate()


def test_configuration_round_trips_through_json_and_refuses_unknown_fields() -> None:
    config = EngineConfig(model=ModelConfig(path="/m"), cache=CacheConfig(num_blocks=7))
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    with pytest.raises(msgspec.ValidationError, match="blok_size"):
        msgspec.json.decode(
            b'{"model": {"path": "/m"}, "cache": {"blok_size": 1}}', type=EngineConfig
        )


def test_the_compatibility_hash_depends_on_everything_that_pods_share() -> None:
    files = {"config.json": b"{}", "index.json": b"1"}
    base = compatibility_hash(files, "float32", "L")
    assert base == compatibility_hash(dict(reversed(files.items())), "float32", "L")
    others = [
        compatibility_hash({**files, "config.json": b"{1}"}, "float32", "L"),
        compatibility_hash(files, "bfloat16", "L"),
        compatibility_hash(files, "float32", "M"),
        compatibility_hash(files, "float32", "L", "int8"),
    ]
    assert len({base, *others}) == 5


def test_container_paths_are_mapped_below_the_pod_root(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("POCKETKUBE_POD_ROOT", raising=False)
    assert str(container_path("/models/x")) == "/models/x"
    (tmp_path / "models/x").mkdir(parents=True)
    monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
    assert container_path("/models/x") == tmp_path / "models/x"
    assert str(container_path("/elsewhere")) == "/elsewhere"
