"""The bodies of errors in the shapes of the two APIs."""

from __future__ import annotations

import pytest

from baton_gateway.errors import APIError, error_body


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_the_status_decides_the_kind_of_error(status: int, kind: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert error_body(path, APIError(status, "x")).error.type == kind
    assert error_body("/v1/completions", APIError(status, "x")).error.code is None
