"""Untrusted text in log lines."""

from __future__ import annotations

from baton_engine import bounded_log


def test_untrusted_text_is_logged_as_one_line() -> None:
    assert bounded_log.one_line("a\n2026-01-01 ERROR forged\x1b[2J\u2028\ud800") == (
        "a\\n2026-01-01 ERROR forged\\x1b[2J\\u2028\\ud800"
    )
    assert len(bounded_log.one_line("x" * 10**6)) < 400
