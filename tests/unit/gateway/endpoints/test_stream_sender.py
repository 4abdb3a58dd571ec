"""The events of a streamed completion: their order, and the last event of a choice."""

from __future__ import annotations

import pytest

from baton_text.output import TextOutput
from baton_text.tokenizer import Tokenizer
from support.gateway.recorded_stream import PROMPT, RecordedStream, make_job, make_sender


@pytest.fixture
def stream() -> RecordedStream:
    return RecordedStream()


@pytest.fixture
def prompt_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


async def test_tokens_without_text_and_the_finish_reason_are_sent(
    tokenizer: Tokenizer, stream: RecordedStream, prompt_ids: list[int]
) -> None:
    job = make_job(prompt_ids)
    sender = make_sender(job, stream, tokenizer)
    for output in (
        TextOutput("", [5, 6]),
        TextOutput(),
        TextOutput("text that was held back"),
        TextOutput(finish_reason="stop"),
    ):
        await sender.send_output(job.choices[0], output)
    sent = [(choice["text"], choice["finish_reason"]) for choice in stream.choices(0)]
    assert sent == [("", None), ("text that was held back", None), ("", "stop")]
    assert job.num_streamed_tokens == 2
