"""The events of a streamed completion: their order, and the offsets of their tokens."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, cast

import msgspec
import pytest

from baton_gateway.endpoints import stream_sender
from baton_gateway.endpoints.stream_sender import StreamSender
from baton_gateway.endpoints.writers.completion_writer import CompletionWriter
from baton_gateway.http.event_stream import EventStream
from baton_gateway.requests.job import Choice, Job, PromptJob, SampleRun
from baton_gateway.routing.sequence import Sequence
from baton_protocol.engine_messages import TokenLogprobs
from baton_text.output import OutputProcessor, TextOutput
from baton_text.requests.completion_request import CompletionRequest
from baton_text.tokenizer import Tokenizer

PROMPT = "hello world"


class RecordedStream:
    """Records the events of a stream in place of sending them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.last = b""

    async def send(self, event: bytes, name: str = "") -> None:
        assert not self.last, "an event after the last one"
        self.events.append(msgspec.json.decode(event))

    async def end(self, last: bytes, name: str = "") -> None:
        self.last = last

    def choices(self, index: int) -> list[dict[str, Any]]:
        """Return the parts of one choice, in the order of the events."""
        choices = [choice for event in self.events for choice in event["choices"]]
        return [choice for choice in choices if choice["index"] == index]


@pytest.fixture
def stream() -> RecordedStream:
    return RecordedStream()


@pytest.fixture
def prompt_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


def make_job(prompt_ids: list[int], num_choices: int = 1, **fields: Any) -> Job:
    """Return a job with one prompt. Its choices have no processors, which a sender does not use."""
    body = CompletionRequest(prompt="", stream=True, **fields)
    echo = PROMPT if body.echo else ""
    choices = [
        Choice(index, cast(OutputProcessor, None), prompt_ids, echo) for index in range(num_choices)
    ]
    runs = [SampleRun(cast(Sequence, None), [choice]) for choice in choices]
    return Job("cmpl-1", body, 0, 0.0, [PromptJob(prompt_ids, runs)])


def make_sender(job: Job, stream: RecordedStream, tokenizer: Tokenizer) -> StreamSender:
    writer = CompletionWriter(cast(CompletionRequest, job.request), job, "m", tokenizer)
    return StreamSender(writer, cast(EventStream, stream))


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, 1, [(token_id, -0.5)]) for token_id in token_ids]


@pytest.mark.parametrize("inline_entries", [0, 1024])
@pytest.mark.parametrize("echo", [False, True])
async def test_the_offsets_of_each_choice_count_the_echoed_prompt_and_its_own_tokens(
    tokenizer: Tokenizer,
    stream: RecordedStream,
    prompt_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
    echo: bool,
    inline_entries: int,
) -> None:
    monkeypatch.setattr(stream_sender, "INLINE_ENTRIES", inline_entries)
    job = make_job(prompt_ids, num_choices=2, echo=echo, logprobs=1)
    answers = [tokenizer.encode(text) for text in (" the quick brown fox", " fox")]
    sender = make_sender(job, stream, tokenizer)
    await sender.begin()
    for step in range(max(map(len, answers))):
        for choice, answer in zip(job.choices, answers, strict=True):
            token_ids = answer[step : step + 1]
            output = TextOutput(tokenizer.decode(token_ids), token_ids, logprobs_of(token_ids))
            if echo and step == 0:
                output.prompt_logprobs = logprobs_of(prompt_ids[1:])
            await sender.send_output(choice, output)
            assert output.prompt_logprobs is None
    await sender.end()
    for index, answer in enumerate(answers):
        logprobs = [choice["logprobs"] for choice in stream.choices(index)]
        texts = [tokenizer.token_text(token) for token in (prompt_ids if echo else []) + answer]
        assert [text for part in logprobs for text in part["tokens"]] == texts
        offsets = [0, *accumulate(map(len, texts))][:-1]
        assert [offset for part in logprobs for offset in part["text_offset"]] == offsets


async def test_an_echo_without_logprobs_comes_before_the_first_token(
    tokenizer: Tokenizer, stream: RecordedStream, prompt_ids: list[int]
) -> None:
    job = make_job(prompt_ids, echo=True)
    sender = make_sender(job, stream, tokenizer)
    await sender.begin()
    await sender.send_output(job.choices[0], TextOutput(" fox", [5]))
    await sender.end()
    assert [choice["text"] for choice in stream.choices(0)] == [PROMPT, " fox"]
    assert stream.last == b"[DONE]"


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
