"""The body of a request: its unknown fields, and the number of its values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.http.request_body import MAX_LOGGED_FIELDS, check_values
from baton_text.request_error import RequestError
from support.gateway.gateway_rig import GatewayRig

TEXT = "hello world, the quick brown fox"
UNKNOWN_FIELDS = "baton:gateway_unknown_body_fields_total"


async def test_unknown_fields_are_counted_logged_once_and_ignored(
    rig: GatewayRig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    await rig.completion()
    assert rig.metric(UNKNOWN_FIELDS) == 0
    for _ in range(2):
        await rig.completion(frobnicate=1)
    status, _, _ = await rig.post("/tokenize", {"prompt": "go", "frobnicate": {"top_k": 1}})
    assert status == 200
    assert rig.metric(UNKNOWN_FIELDS) == 3
    [line] = [line for line in caplog.messages if "unknown field" in line]
    assert "'frobnicate'" in line


async def test_the_log_of_unknown_fields_is_bounded(
    rig: GatewayRig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.start(rig.engine("d", "decode", TEXT))
    await rig.completion(**{f"{i}\n" + "x" * 9999: 1 for i in range(MAX_LOGGED_FIELDS + 5)})
    assert rig.metric(UNKNOWN_FIELDS) == MAX_LOGGED_FIELDS + 5
    lines = [line for line in caplog.messages if "unknown field" in line]
    assert len(lines) == MAX_LOGGED_FIELDS
    assert all(len(line) < 200 and "\n" not in line for line in lines)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:\n\u00e9'),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(alphabet='k"\\,[{:'), inner, max_size=4)
    ),
    max_leaves=30,
)


def count_values(value: Any) -> tuple[int, int]:
    """Return the numbers of values and of containers, as the limits count them.

    Values are counted by commas and colons.
    """
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [count_values(item) for item in (value.values() if isinstance(value, dict) else value)]
    marks = 1 + max(0, len(value) - 1) + (len(value) if isinstance(value, dict) else 0)
    return marks + sum(count for count, _ in inner), 1 + sum(count for _, count in inner)


@given(value=_JSON, ascii_only=st.booleans())
def test_values_are_counted_exactly_for_any_json(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    values, containers = count_values(value)
    check_values(body, values, containers)
    if values:
        with pytest.raises(RequestError, match=r"arrays and objects$|arrays and objects;"):
            check_values(body, values, containers - 1)
        with pytest.raises(RequestError, match="values;"):
            check_values(body, values - 1, containers)


@given(body=st.text(alphabet='"\\[{,:a').map(str.encode), most=st.integers(0, 3))
def test_invalid_json_is_counted_without_other_errors(body: bytes, most: int) -> None:
    try:
        check_values(body, most, most)
    except RequestError as error:
        assert error.code == "request_too_large"  # noqa: PT017 (an error is optional)
