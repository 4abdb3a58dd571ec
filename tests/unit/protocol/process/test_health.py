"""The loading progress as text."""

from __future__ import annotations

import pytest

from baton_protocol.process.health import LoadProgress


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0, 0, ""),
        (3, 4, "75 % of 4.0 bytes"),
        (3 * 2**30, 14 * 2**30, "21 % of 14.0 GiB"),
        (2**20, 2**20, "100 % of 1.0 MiB"),
    ],
)
def test_progress_is_written_as_text(done: int, total: int, text: str) -> None:
    assert str(LoadProgress(done, total)) == text
