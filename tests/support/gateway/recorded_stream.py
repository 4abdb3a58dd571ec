"""A stream that records what is sent, and the job that it belongs to."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from baton_gateway.endpoints.stream_sender import StreamSender
from baton_gateway.endpoints.writers.completion_writer import CompletionWriter
from baton_gateway.http.event_stream import EventStream
from baton_gateway.requests.job import Choice, Job, PromptJob, SampleRun
from baton_gateway.routing.sequence import Sequence
from baton_text.output import OutputProcessor
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
