"""Bodies that JSON or YAML parsers accept, but responses could not contain."""

import pytest

from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.serving.request_parsing import parse_body

JSON, YAML = "application/json", "application/yaml"


@pytest.mark.parametrize(
    ("raw", "media_type"),
    [
        (rb'{"a": "\ud800"}', JSON),
        (rb'a: "\ud800"', YAML),
        (b'{"a": NaN}', JSON),
        (b"[" * 100_000, JSON),
        (b"[" * 100_000, YAML),
        (b"? [a]\n: b", YAML),
        (b"true: b", YAML),
        (b"a: &a [b]\nc: *a", YAML),
        (b"a: !!python/name:os.system", YAML),
    ],
)
def test_bodies_that_are_no_json_are_refused(raw: bytes, media_type: str) -> None:
    with pytest.raises(ApiError, match="the request's body is not ") as caught:
        parse_body(raw, media_type, [JSON, YAML])
    assert caught.value.code == 400


def test_yaml_and_json_are_decoded_alike() -> None:
    expected = {"a": [1, 1.5, None, True, "\N{GREEK SMALL LETTER ALPHA}"], "b": {"1": "2026-11-30"}}
    in_json = rb'{"a": [1, 1.5, null, true, "\u03b1"], "b": {"1": "2026-11-30"}}'
    in_yaml = "a: [1, 1.5, null, true, \u03b1]\nb: {1: 2026-11-30}".encode()
    assert parse_body(in_json, JSON) == parse_body(in_yaml, YAML) == expected
