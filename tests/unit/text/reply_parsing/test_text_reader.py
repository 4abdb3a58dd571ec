"""The reader of a reply: every marker is read once."""

from __future__ import annotations

import time

from baton_text.reply_parsing.text_reader import Reading, TextReader


def test_a_reply_of_markers_is_read_in_one_pass() -> None:
    """The time grew with the square of their number: 3 s for 16,000 markers."""
    reader, markers = TextReader(), ("<|end|>", "<|call|>")
    reader.push("".join(markers) * 8000)
    reader.has_ended = True
    found: list[str] = []

    def read() -> Reading[None]:
        while marker := (yield from reader.read_until(markers, lambda text: None)):
            found.append(marker)

    started = time.thread_time()
    assert not list(read())
    assert time.thread_time() - started < 1.0
    assert found == [*markers] * 8000
