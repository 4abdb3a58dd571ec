"""The account of engines and coordinator."""

from __future__ import annotations

from baton_operator.builders import engine_account
from support.operator.services import resolved


def test_the_account_of_engines_has_no_token() -> None:
    account = engine_account.build(resolved())
    assert account["metadata"]["name"] == "demo-engine"
    assert account["automountServiceAccountToken"] is False
