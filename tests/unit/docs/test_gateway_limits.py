"""The limits in docs/operate/security.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from baton_gateway import server
from baton_gateway.access import admission, auth_delays
from baton_gateway.http import body_budget, connections, request_body, slow_clients
from baton_gateway.requests import job_builder
from baton_protocol.options.config import GatewayConfig
from baton_text.requests import generation_request

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "operate" / "security.md"
[MAX_CONNECTIONS] = (
    field.default
    for field in msgspec.structs.fields(GatewayConfig)
    if field.name == "max_connections"
)


def power_of_two(value: int) -> str:
    assert value.bit_count() == 1
    return f"2^{value.bit_length() - 1}"


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
        ("connections of clients", f"the smallest of {MAX_CONNECTIONS} "),
        ("connections to the metrics port", f"the smallest of {server.METRICS_CONNECTIONS},"),
        (
            "TLS handshake and first request's head",
            f"{connections.HEAD_TIMEOUT_S:g} s",
        ),
        ("idle connection", f"{connections.KEEP_ALIVE_S:g} s after a response"),
        (
            "reading a response that fits into the connection's buffer",
            f"{connections.WRITE_TIMEOUT_S:g} s",
        ),
        ("headers of a request", f"{connections.MAX_HEADERS} |"),
        ("bytes without a complete head", f"{connections.MAX_HEAD_BYTES >> 10} KiB"),
        (
            "requests that arrive while their connection serves another",
            f"{2 * connections.READ_BUFFER_BYTES >> 10} KiB",
        ),
        (
            "401 responses to one address",
            f"{auth_delays.BURST} at once, and one more every {auth_delays.REFILL_S:g} s | "
            f"Further ones wait {auth_delays.DELAY_S:g} s",
        ),
        ("JSON values of a body", f"{power_of_two(request_body.MAX_VALUES)}, plus"),
        ("arrays and objects of a body", f"{power_of_two(request_body.MAX_CONTAINERS)} |"),
        (
            "entries of long options of one request",
            f"{power_of_two(generation_request.MAX_OPTION_ENTRIES)} |",
        ),
        (
            "entries of long options of all running requests",
            f"{power_of_two(generation_request.MAX_OPTION_ENTRIES)} of one key, and "
            f"{power_of_two(admission.MAX_TOTAL_OPTION_ENTRIES)} together",
        ),
        (
            "prompts that a response repeats (`echo`)",
            f"{power_of_two(job_builder.MAX_ECHO_CHARACTERS)} characters",
        ),
        (
            "log-probabilities of a response that is not streamed",
            f"{power_of_two(generation_request.MAX_RESPONSE_LOGPROBS)} |",
        ),
    ],
)
def test_a_limit_is_that_of_the_code(limit: str, value: str) -> None:
    assert f"| {limit} | {value}" in PAGE.read_text()


def test_unread_log_probabilities_have_the_limit_of_the_code() -> None:
    [row] = re.findall(r"^\| unread outputs \|.*$", PAGE.read_text(), re.MULTILINE)
    assert f"and {power_of_two(slow_clients.MAX_UNREAD_LOGPROBS)} log-probabilities |" in row


def test_every_limit_in_the_page_of_the_gateway_has_its_value_in_the_page_of_security() -> None:
    page = (DOCS / "internals" / "gateway.md").read_text()
    _, section = page.split("## Limits of requests and connections\n")
    rows = re.findall(r"^\| (.+) \| `\S+\.py` \|$", section.split("\n## ")[0], re.MULTILINE)
    limits = [limit for row in rows for limit in row.split(", ")]
    valued = re.findall(r"^\| (.+?) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert len(limits) > 15
    assert set(limits) - set(valued) == set()


def test_the_reference_gives_the_value_of_every_limit() -> None:
    assert re.findall(r"MAX_\w+", (DOCS / "reference" / "openai.md").read_text()) == []
