"""Sends the outputs of one job to its client, as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from baton_gateway.endpoints.writers.generation_api import (
    INLINE_ENTRIES,
    LARGE_ENTRIES,
    GenerationWriter,
)
from baton_gateway.http.event_stream import EventStream
from baton_gateway.requests.job import Choice
from baton_gateway.thread_pool import run_encoding, run_off_loop
from baton_text.output import TextOutput


class StreamSender:
    """Sends the events of one streamed response.

    Call `begin`, then `send_output` for each output, then `end`. Each of these methods raises
    ConnectionError if the client has disconnected, or does not read the events.

    Args:
        writer: converts the outputs of the job to events.
        stream: the stream that carries the events to the client.
    """

    def __init__(self, writer: GenerationWriter[Any], stream: EventStream) -> None:
        self._writer = writer
        self._stream = stream
        #: By the index of the choice: number of characters of all tokens whose log-probabilities
        #: were sent, including the tokens of an echoed prompt.
        self._offsets = {choice.index: 0 for choice in writer.job.choices}

    async def begin(self) -> None:
        """Send the events that come before the first output."""
        await self._send(self._encode(self._writer.opening()))

    async def send_output(self, choice: Choice, output: TextOutput) -> None:
        """Send the events of one output of `choice`.

        Then set the output's `prompt_logprobs` to None, to free memory.
        """
        # Also send tokens without text: clients measure the time between tokens by the chunks.
        if output.text or output.token_ids or output.finish_reason is not None:
            self._writer.job.num_streamed_tokens += len(output.token_ids)
            events = await run_encoding(
                lambda: self._encode(
                    self._writer.events(choice, output, self._offsets[choice.index])
                ),
                output.num_logprobs,
                INLINE_ENTRIES,
                LARGE_ENTRIES,
            )
            await self._send(events)
        if output.prompt_logprobs is not None:  # streamed only with echo
            prompt = choice.prompt_token_ids
            count = partial(self._num_characters, prompt)
            self._offsets[choice.index] += await run_off_loop(count, len(prompt))
            output.prompt_logprobs = None  # the caller may keep the output
        token_ids = (item.token_id for item in output.logprobs)
        self._offsets[choice.index] += self._num_characters(token_ids)

    async def end(self) -> None:
        """Send the events that come after the last output, and end the stream."""
        await self._send(self._encode(self._writer.closing()))
        await self._stream.end(self._writer.LAST_EVENT)

    def _encode(self, events: list[msgspec.Struct]) -> list[tuple[bytes, str]]:
        """Return (JSON, event name) for each event."""
        return [(msgspec.json.encode(event), self._writer.name(event)) for event in events]

    async def _send(self, events: list[tuple[bytes, str]]) -> None:
        for event, name in events:
            await self._stream.send(event, name)

    def _num_characters(self, token_ids: Iterable[int]) -> int:
        token_text = self._writer.tokenizer.token_text
        return sum(len(token_text(token_id)) for token_id in token_ids)
