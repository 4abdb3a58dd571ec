"""A queue of one job's outputs, and `CollectedOutput`, which joins outputs compactly."""

from __future__ import annotations

import asyncio
import io
from array import array
from collections import deque

import msgspec

from baton_gateway.requests.job import Choice
from baton_protocol.engine_messages import PromptLogprobs, TokenLogprobs
from baton_text.output import TextOutput
from baton_text.reply_parsing.reply_parser import ReplyDelta
from baton_text.reply_parsing.tool_formats import ToolCallDelta, merge_deltas

#: While fewer outputs than this wait, each waits as it is. Further outputs of a choice are joined.
MAX_SINGLE_OUTPUTS = 8
#: Limit on the tokens of a joined output. A joined output is sent as one event, which the client
#: must read within a timeout.
MAX_JOINED_TOKENS = 64

_LOGPROBS = msgspec.msgpack.Decoder(list[TokenLogprobs])
_PROMPT_LOGPROBS = msgspec.msgpack.Decoder(PromptLogprobs | None)


class CollectedOutput:
    """Joins outputs of one choice into one output.

    The outputs are stored in a compact form, because each token in a TextOutput takes 0.5 KB, and
    its log-probabilities take up to 2 KB.
    """

    def __init__(self) -> None:
        self.num_outputs = 0
        self._last = TextOutput()
        self._text = io.StringIO()
        self._token_ids = array("i")
        #: The log-probabilities of each output, in MessagePack.
        self._logprobs: list[bytes] = []
        self._prompt_logprobs = msgspec.msgpack.encode(None)
        self._num_nans = 0
        self._reasoning = io.StringIO()
        self._content = io.StringIO()
        self._tool_calls: list[ToolCallDelta] = []

    def add(self, output: TextOutput) -> None:
        """Append `output`, and set its `prompt_logprobs` to None."""
        self.num_outputs += 1
        self._last = output
        self._text.write(output.text)
        self._token_ids.extend(output.token_ids)
        if output.logprobs:
            self._logprobs.append(msgspec.msgpack.encode(output.logprobs))
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = msgspec.msgpack.encode(output.prompt_logprobs)
            output.prompt_logprobs = None
        self._num_nans += output.num_nans_in_logits
        if output.reply is not None:
            self._reasoning.write(output.reply.reasoning)
            self._content.write(output.reply.content)
            self._tool_calls += output.reply.tool_calls

    def continues_with(self, output: TextOutput) -> bool:
        """Return whether `output` may be joined to the outputs that were added before.

        False if the result would have more than MAX_JOINED_TOKENS tokens, or if joining would
        change the order of reasoning, text and tool calls.
        """
        if len(self._token_ids) + len(output.token_ids) > MAX_JOINED_TOKENS:
            return False
        reply = output.reply
        return reply is None or not (
            (self._tool_calls and (reply.reasoning or reply.content))
            or (self._content.tell() and reply.reasoning)
        )

    def output(self) -> TextOutput:
        """Return one output that joins all added outputs."""
        calls = merge_deltas(self._tool_calls)
        reply = ReplyDelta(self._reasoning.getvalue(), self._content.getvalue(), calls)
        return TextOutput(
            text=self._text.getvalue(),
            token_ids=self._token_ids.tolist(),
            logprobs=[item for items in self._logprobs for item in _LOGPROBS.decode(items)],
            finish_reason=self._last.finish_reason,
            stop_reason=self._last.stop_reason,
            prompt_logprobs=_PROMPT_LOGPROBS.decode(self._prompt_logprobs),
            num_nans_in_logits=self._num_nans,
            reply=None if self._last.reply is None else reply,
        )


class OutputQueue:
    """Queue of one job's outputs and failures, from which the request's HTTP handler reads.

    While a client reads slowly, the outputs of each choice are joined, so that they take less
    memory and the client receives fewer, longer events.
    """

    def __init__(self) -> None:
        #: Outputs, failures and ends of sequences (None), in the order of their arrival.
        self._events: deque[tuple[Choice, TextOutput | CollectedOutput] | Exception | None] = (
            deque()
        )
        #: By the index of the choice: the output in `_events` to which `put` joins later outputs.
        self._joined: dict[int, CollectedOutput] = {}
        self._arrived = asyncio.Event()
        #: Number of outputs that wait, and number of log-probabilities in these outputs.
        self.num_outputs = 0
        self.num_logprobs = 0

    def put(self, choice: Choice, output: TextOutput) -> None:
        """Add an output of `choice`."""
        self.num_outputs += 1
        self.num_logprobs += output.num_logprobs
        joined = self._joined.get(choice.index)
        if joined is None and len(self._events) < MAX_SINGLE_OUTPUTS:
            self._events.append((choice, output))
            self._arrived.set()
            return
        if joined is None or not joined.continues_with(output):
            joined = self._joined[choice.index] = CollectedOutput()
            self._events.append((choice, joined))
        joined.add(output)

    def end_sequence(self) -> None:
        """Add the end of one sequence, for which `get` returns None after all earlier outputs."""
        self._events.append(None)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Add a failure, which `get` raises after all earlier outputs."""
        self._events.append(error)
        self._arrived.set()

    async def get(self) -> tuple[Choice, TextOutput] | None:
        """Remove and return the next output with its choice, or None for the end of a sequence.

        If the queue is empty, wait for the next entry.

        Raises:
            Exception: the failure of a sequence.
        """
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        if event is None:
            return None
        choice, output = event
        if isinstance(output, CollectedOutput):
            # A client that reads many joined outputs at once must not stop the other requests.
            await asyncio.sleep(0)
            if self._joined.get(choice.index) is output:
                del self._joined[choice.index]
            self.num_outputs -= output.num_outputs
            output = output.output()
        else:
            self.num_outputs -= 1
        self.num_logprobs -= output.num_logprobs
        return choice, output
