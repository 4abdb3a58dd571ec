"""Fields without a schema are checked, and a message names the field that is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton_operator.builders.pod_template.free_form_fields import (
    MAX_DEPTH,
    check_depth,
    check_resources,
    must_be,
    strings,
)


def nested(levels: int) -> Any:
    """Return a value of `levels` objects and lists inside each other."""
    value: Any = "leaf"
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def test_values_are_accepted_up_to_the_maximum_depth() -> None:
    check_depth(nested(MAX_DEPTH - 1), "template")
    with pytest.raises(ValueError, match=f"^template is nested more than {MAX_DEPTH} levels deep"):
        check_depth(nested(MAX_DEPTH), "template")


@pytest.mark.parametrize(
    "resources",
    [
        None,
        {},
        {"requests": None},
        {"limits": {"cpu": 2, "memory": "1Gi"}, "requests": {"cpu": 0.5}},
        {"claims": [{"name": "gpu"}]},
    ],
)
def test_resources_of_kubernetes_are_accepted(resources: Any) -> None:
    check_resources(resources, "decode.resources")


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ([], "decode.resources must be an object, got []"),
        ({"limits": "1"}, 'decode.resources.limits must be an object, got "1"'),
        ({"requests": {"cpu": True}}, "decode.resources.requests.cpu must be a quantity, got true"),
        ({"limits": {"cpu": {}}}, "decode.resources.limits.cpu must be a quantity, got {}"),
    ],
)
def test_other_resources_are_refused_with_the_field(resources: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_resources(resources, "decode.resources")


def test_null_labels_are_left_out_and_other_values_must_be_strings() -> None:
    assert strings({"a": "1", "b": None}, "metadata.labels") == {"a": "1"}
    with pytest.raises(ValueError, match=r"^metadata\.labels\.a must be a string, got 1$"):
        strings({"a": 1}, "metadata.labels")
    with pytest.raises(ValueError, match=r"^metadata\.labels must be an object, got null$"):
        strings(None, "metadata.labels")


def test_a_long_value_is_truncated_in_the_message() -> None:
    short, long = str(must_be("a list", "x", "y" * 10)), str(must_be("a list", "x", "y" * 1000))
    assert short.endswith("y" * 10 + '"')
    assert long.endswith("y ...")
    assert len(long) < 200
