"""The limits in docs/internals/gateway.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton_gateway.http import body_budget, slow_clients
from baton_text.requests import generation_request

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "internals" / "gateway.md"


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("body", f"{body_budget.MAX_BODY_BYTES >> 20} MiB"),
        (
            "bodies of all requests whose prompts are not tokenized",
            f"{body_budget.MAX_TOTAL_BODY_BYTES >> 20} MiB",
        ),
        (
            "stop strings",
            f"{generation_request.MAX_STOPS}, of {generation_request.MAX_STOP_CHARACTERS} "
            "characters together",
        ),
        ("unread outputs", f"{slow_clients.MAX_UNREAD_OUTPUTS} per choice"),
        (
            "sending a body",
            f"{body_budget.BODY_TIMEOUT_S:g} s, and 1 s for each "
            f"{body_budget.MIN_BODY_RATE >> 10} KiB",
        ),
    ],
)
def test_a_limit_is_that_of_the_code(limit: str, value: str) -> None:
    assert f"| {limit} | {value}" in PAGE.read_text()


def test_the_reference_gives_the_value_of_every_limit() -> None:
    assert re.findall(r"MAX_\w+", (DOCS / "reference" / "openai.md").read_text()) == []
