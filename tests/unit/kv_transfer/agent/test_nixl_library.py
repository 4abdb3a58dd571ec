"""The import of the NIXL library."""

from __future__ import annotations

import logging
import sys

import pytest

from baton_kv_transfer.agent.agent_factory import create_agent


def test_nixl_is_imported_on_demand_and_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    create_agent("me", "inproc").close()
    with pytest.raises(ValueError, match=r"pip install 'baton\[nixl\]' \(package nixl-cu12\)"):
        create_agent("me", "nixl")


def test_nixl_does_not_change_this_programs_logging(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.raiseExceptions
    create_agent("me", "nixl").close()
    assert logging.raiseExceptions == before
    assert capfd.readouterr().out == ""
