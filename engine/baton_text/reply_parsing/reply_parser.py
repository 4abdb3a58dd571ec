"""Divides a generated text into reasoning, content and tool calls, as the text arrives.

The result does not depend on how the text is divided into pieces. A text that is not a valid call
is content.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

import msgspec

from baton_text.reply_parsing.reasoning import ReasoningFormat
from baton_text.reply_parsing.text_reader import BadSyntaxError, EndOfTextError, Reading, TextReader
from baton_text.reply_parsing.tool_formats import Calls, ToolCallDelta, ToolFormat, merge_deltas


class ReplyDelta(msgspec.Struct):
    """What a piece of text adds to a reply."""

    reasoning: str = ""
    content: str = ""
    #: One delta for each call.
    tool_calls: list[ToolCallDelta] = []

    @classmethod
    def join(cls, deltas: Sequence[ReplyDelta]) -> ReplyDelta:
        return cls(
            "".join(delta.reasoning for delta in deltas),
            "".join(delta.content for delta in deltas),
            merge_deltas(call for delta in deltas for call in delta.tool_calls),
        )


class _Text:
    """The reasoning or the content of the reply.

    Trailing whitespace is held back until more text arrives, or until `add_spaces` is called. If
    `strips_start` is set, leading whitespace is dropped.
    """

    def __init__(self) -> None:
        self._delta = ""
        #: Pieces of whitespace that are dropped if no text follows.
        self._spaces: list[str] = []
        self.strips_start = False
        self.is_empty = True

    def add(self, text: str) -> None:
        if self.strips_start:
            self._spaces.clear()
            text = text.lstrip()
        stripped = text.rstrip()
        if stripped:
            self.strips_start = self.is_empty = False
            self.add_spaces()
            self._delta += stripped
        self._spaces.append(text[len(stripped) :])

    def begin_paragraph(self) -> None:
        """Put an empty line between the text so far and the next text."""
        if not self.is_empty:
            self._spaces = ["\n\n"]
            self.strips_start = False

    def add_spaces(self) -> None:
        """Add the whitespace that was held back."""
        self._delta += "".join(self._spaces)
        self._spaces.clear()

    def take(self) -> str:
        taken, self._delta = self._delta, ""
        return taken


class ReplyParser:
    """Parses the text of one reply.

    Args:
        reasoning: the format of the reasoning. None: the reply has none.
        is_reasoning: the prompt ends inside the reasoning.
        tool_format: the format of tool calls. None: the reply has none.
        tools: the names of the tools that may be called.
        is_guaranteed: a grammar makes all calls complete and valid, so their arguments are
            reported as they arrive.
        is_single: the reply keeps only its first call. Later calls are dropped.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None = None,
        is_reasoning: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Collection[str] = (),
        is_guaranteed: bool = False,
        is_single: bool = False,
    ) -> None:
        self._reader = TextReader()
        self._reasoning = _Text()
        self._reasoning.strips_start = True
        self._content = _Text()
        self._calls = Calls(tools, is_guaranteed)
        self._is_single = is_single
        self._is_truncated = False
        #: Whether the text so far ends inside the reasoning.
        self.is_reasoning = is_reasoning
        self._parsing = self._parse(reasoning, is_reasoning, tool_format)

    @property
    def num_calls(self) -> int:
        """Number of complete tool calls."""
        return self._calls.num_calls

    def push(self, text: str) -> ReplyDelta:
        """Add a piece of text, and return what this piece adds to the reply."""
        self._reader.push(text)
        return self._advance()

    def finish(self, *, is_truncated: bool) -> ReplyDelta:
        """End the text, and return what the text that was held back adds to the reply.

        Args:
            is_truncated: a limit on tokens has ended the text. A call that is not complete keeps
                the arguments that have arrived.
        """
        self._is_truncated = is_truncated
        self._reader.has_ended = True
        return self._advance()

    def _advance(self) -> ReplyDelta:
        next(self._parsing, None)
        calls = self._calls.take()
        if self._is_single:
            calls = [call for call in calls if call.index == 0]
        return ReplyDelta(self._reasoning.take(), self._content.take(), calls)

    def _parse(
        self,
        reasoning: ReasoningFormat | None,
        is_reasoning: bool,
        tool_format: ToolFormat | None,
    ) -> Generator[None, None, None]:
        if reasoning is not None:
            yield from self._read_reasoning(reasoning, is_reasoning)
        if tool_format is not None and not tool_format.markers:
            yield from self._read_only_calls(tool_format)
        elif tool_format is not None:
            yield from self._read_marked_calls(tool_format, reasoning)
        yield from self._reader.read_until((), self._add_content)
        if not self._calls.num_calls:
            self._content.add_spaces()

    def _read_reasoning(self, reasoning: ReasoningFormat, is_reasoning: bool) -> Reading[None]:
        if not is_reasoning:
            spaces = yield from self._reader.skip_spaces()
            if not (yield from self._reader.skip(reasoning.start)):
                self._content.add(spaces)
                return
        yield from self._read_to_end(reasoning)

    def _read_to_end(self, reasoning: ReasoningFormat) -> Reading[None]:
        """Read the rest of the reasoning, up to and including its end marker."""
        self.is_reasoning = True
        yield from self._reader.read_until((reasoning.end,), self._reasoning.add)
        self.is_reasoning = False
        self._content.strips_start |= self._content.is_empty

    def _read_marked_calls(
        self, tool_format: ToolFormat, reasoning: ReasoningFormat | None
    ) -> Reading[None]:
        markers = [*tool_format.markers, *tool_format.ignored]
        if reasoning is not None and reasoning.may_repeat:
            markers.append(reasoning.start)
        while marker := (yield from self._reader.read_until(markers, self._add_content)):
            if marker in tool_format.markers:
                yield from self._read_calls(tool_format, marker)
            elif reasoning is not None and marker == reasoning.start:
                self._reasoning.begin_paragraph()
                yield from self._read_to_end(reasoning)

    def _read_only_calls(self, tool_format: ToolFormat) -> Reading[None]:
        spaces = yield from self._reader.skip_spaces()
        for ignored in tool_format.ignored:
            yield from self._reader.skip(ignored)
        self._content.add(spaces)
        yield from self._read_calls(tool_format, "")
        for ignored in tool_format.ignored:
            yield from self._reader.skip_spaces()
            yield from self._reader.skip(ignored)

    def _read_calls(self, tool_format: ToolFormat, marker: str) -> Reading[None]:
        """Read the calls after a marker. Text that is not a call becomes content."""
        reader, num_before = self._reader, self._calls.num_calls
        reader.mark()
        try:
            yield from tool_format.read(reader, self._calls)
        except BadSyntaxError as error:
            # The start of a guaranteed call has already been reported, so the call is kept.
            is_kept = self._is_truncated or self._calls.is_guaranteed
            if isinstance(error, EndOfTextError) and is_kept and self._calls.end_truncated():
                reader.forget_mark()
                return
            self._calls.cancel()
            if not self._calls.is_guaranteed:
                if self._calls.num_calls == num_before:
                    self._add_content(marker)
                reader.rewind()
        reader.forget_mark()

    def _add_content(self, text: str) -> None:
        if self._calls.num_calls and self._content.is_empty:
            self._content.strips_start = True
        self._content.add(text)
