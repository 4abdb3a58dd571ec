"""Structured outputs of a request in the form of the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton_protocol.sampling_params import (
    MAX_SPEC_LENGTH,
    StructuredOutput,
    StructuredOutputKind,
)
from baton_text.requests.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("given", "kind", "spec"),
    [
        ({"regex": "a+"}, StructuredOutputKind.REGEX, "a+"),
        ({"choice": ["a", "b"]}, StructuredOutputKind.CHOICE, json.dumps(["a", "b"])),
        ({"json": False}, StructuredOutputKind.JSON, "false"),
        ({"json_object": False, "regex": "a"}, StructuredOutputKind.REGEX, "a"),
    ],
)
def test_the_field_that_is_set_is_the_structure(
    given: dict[str, Any], kind: StructuredOutputKind, spec: str
) -> None:
    assert StructuredOutputsParams(**given).to_structured_output() == StructuredOutput(kind, spec)


def test_without_a_field_there_is_no_structure() -> None:
    assert StructuredOutputsParams(json_object=False).to_structured_output() is None
    json_object = StructuredOutputsParams(json_object=True).to_structured_output()
    assert json_object == StructuredOutput(StructuredOutputKind.JSON_OBJECT)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "a", "grammar": "b"}, "grammar cannot be combined with regex"),
        ({"choice": []}, "choice must hold at least one string"),
        ({"regex": "a" * (MAX_SPEC_LENGTH + 1)}, "regex"),
    ],
)
def test_an_invalid_structure_is_refused_with_the_field(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        StructuredOutputsParams(**given).to_structured_output()
