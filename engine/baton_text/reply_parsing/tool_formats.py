"""How models of each family write tool calls.

Each `read_` function is a generator, as `text_reader` describes. It reads the text after a marker
of its format, and reports the calls to `Calls`.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
from msgspec import UNSET, UnsetType

from baton_text.reply_parsing.text_reader import (
    BadSyntaxError,
    EndOfTextError,
    Reading,
    TextReader,
    without_surrogates,
)

#: The texts that are special tokens in some tokenizers, such as <tool_call> and [ARGS].
SPECIAL_TEXT = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
#: Keys of a call's arguments in JSON.
ARGUMENT_KEYS = ("arguments", "parameters")
#: Limit on the characters of a list of calls in Python's syntax. A longer list is treated as text,
#: because its syntax tree would take too long.
MAX_PYTHONIC_LENGTH = 2**16
_NAME = re.compile(r"[\w.-]")


class ToolCallDelta(msgspec.Struct):
    """What a piece of text adds to one tool call."""

    #: Number of the call in the reply, from 0 on.
    index: int
    #: Name of the tool. Only in the call's first delta.
    name: str | UnsetType = UNSET
    #: JSON text to append to the arguments.
    arguments: str = ""


def merge_deltas(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join the deltas of each call to one delta. The deltas of a call must be consecutive."""
    merged = []
    for index, group in itertools.groupby(deltas, attrgetter("index")):
        first, *rest = group
        arguments = "".join(delta.arguments for delta in (first, *rest))
        merged.append(ToolCallDelta(index, first.name, arguments))
    return merged


@dataclass
class Calls:
    """Collects the tool calls that a reader of a tool format finds.

    A call is held back until it is complete, because an incomplete call may turn out to be text.
    If a grammar guarantees complete calls, their arguments are reported as they arrive.

    Args:
        tools: the names of the tools that may be called. A call of another name is text.
        is_guaranteed: a grammar makes all calls complete and valid.
    """

    tools: Collection[str]
    is_guaranteed: bool
    #: Final deltas that `take` has not returned yet.
    deltas: list[ToolCallDelta] = field(default_factory=list)
    #: Number of calls that have ended.
    num_calls: int = 0
    _name: str | None = None
    _arguments: list[str] = field(default_factory=list)

    def begin(self, name: str) -> None:
        """Begin a call of the tool `name`. The call becomes the current call.

        Raises:
            BadSyntaxError: the request has no such tool.
        """
        if name not in self.tools:
            raise BadSyntaxError
        self._name, self._arguments = name, []
        if self.is_guaranteed:
            self.deltas.append(ToolCallDelta(self.num_calls, name))

    def add(self, arguments: str) -> None:
        """Add text to the arguments of the current call."""
        if self.is_guaranteed:
            self.deltas.append(ToolCallDelta(self.num_calls, arguments=arguments))
        else:
            self._arguments.append(arguments)

    def end(self, reader: TextReader) -> None:
        """End the current call, and mark the position after it for `TextReader.rewind`.

        Raises:
            BadSyntaxError: no call has begun, or its arguments are not a JSON object.
        """
        if self._name is None:
            raise BadSyntaxError
        self._end(self._name, _checked)
        reader.mark()

    def cancel(self) -> None:
        """Drop the current call. If its start was already reported, end the call instead."""
        if self.is_guaranteed and self._name is not None:
            self.num_calls += 1
        self._name = None

    def end_truncated(self) -> bool:
        """End the current call, which the token limit has cut off, and keep its arguments so far.

        Returns:
            Whether a call had begun.
        """
        if self._name is None:
            return False
        self._end(self._name, str)
        return True

    def _end(self, name: str, check: Callable[[str], str]) -> None:
        if not self.is_guaranteed:
            arguments = check("".join(self._arguments))
            self.deltas.append(ToolCallDelta(self.num_calls, name, arguments))
        self.num_calls += 1
        self._name = None

    def take(self) -> list[ToolCallDelta]:
        """Return and drop the deltas since the last `take`, joined to one delta for each call."""
        taken, self.deltas = self.deltas, []
        return merge_deltas(taken)


def _checked(arguments: str) -> str:
    """Return the arguments as JSON that every parser accepts.

    Raises:
        BadSyntaxError: the arguments are not a JSON object.
    """
    try:
        value = json.loads(arguments, strict=False)
        if not isinstance(value, dict):
            raise BadSyntaxError
        try:
            msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError):  # such as a line break in a string
            return without_surrogates(json.dumps(value, ensure_ascii=False))
    except (ValueError, RecursionError):
        raise BadSyntaxError from None
    return arguments


def read_call_object(reader: TextReader, calls: Calls) -> Reading[None]:
    """Read `{"name": ..., "arguments": {...}}`."""
    yield from reader.expect("{")
    name: str | None = None
    before_name = ""
    has_arguments = False
    while True:
        yield from reader.skip_spaces()
        key = yield from reader.read_json_string()
        yield from reader.skip_spaces()
        yield from reader.expect(":")
        yield from reader.skip_spaces()
        if key == "name":
            if name is not None:
                raise BadSyntaxError
            name = yield from reader.read_json_string()
            calls.begin(name)
            calls.add(before_name)
        elif key in ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            pieces: list[str] = []
            yield from _read_arguments(reader, calls.add if name is not None else pieces.append)
            before_name = "".join(pieces)
        else:
            yield from _skip_value(reader)
        yield from reader.skip_spaces()
        if (yield from reader.skip("}")):
            break
        yield from reader.expect(",")
    if name is None:
        raise BadSyntaxError
    if not has_arguments:
        calls.add("{}")
    calls.end(reader)


def _read_arguments(reader: TextReader, emit: Callable[[str], None]) -> Reading[None]:
    """Read an object, a string with the text of an object, or null, which means no arguments."""
    first = yield from reader.peek()
    if first == '"':
        emit((yield from reader.read_json_string()))
    elif first == "{":
        yield from reader.read_json(emit)
    elif (yield from reader.skip("null")):
        emit("{}")
    else:
        yield from reader.need()
        raise BadSyntaxError


_SCALAR = re.compile(r"[-+.\w]")


def _skip_value(reader: TextReader) -> Reading[None]:
    """Read a JSON value and drop it."""
    if (yield from reader.peek()) in ('"', "{", "["):
        yield from reader.read_json(lambda _: None)
    elif not (yield from reader.read_word(_SCALAR)):
        yield from reader.need()
        raise BadSyntaxError


def read_call_list(reader: TextReader, calls: Calls) -> Reading[None]:
    """Read `[{"name": ...}, ...]`. The list may have one element or more."""
    yield from reader.expect("[")
    while True:
        yield from reader.skip_spaces()
        yield from read_call_object(reader, calls)
        yield from reader.skip_spaces()
        if (yield from reader.skip("]")):
            return
        yield from reader.expect(",")


def read_hermes(reader: TextReader, calls: Calls) -> Reading[None]:
    r"""Read `\n{"name": ...}\n</tool_call>` after `<tool_call>`."""
    yield from reader.skip_spaces()
    yield from read_call_object(reader, calls)
    yield from reader.skip_spaces()
    yield from reader.skip("</tool_call>")


def read_llama3(reader: TextReader, calls: Calls) -> Reading[None]:
    """Read one or more `{"name": ..., "parameters": {...}}`, separated by semicolons."""
    while True:
        yield from reader.skip_spaces()
        yield from read_call_object(reader, calls)
        yield from reader.skip_spaces()
        if not (yield from reader.skip(";")):
            return


def read_json(reader: TextReader, calls: Calls) -> Reading[None]:
    """Read one call as a JSON object, or a JSON list of calls."""
    if (yield from reader.follows("[")):
        yield from read_call_list(reader, calls)
    else:
        yield from read_call_object(reader, calls)


def read_mistral(reader: TextReader, calls: Calls) -> Reading[None]:
    """Read a list of calls, or `NAME[ARGS]{...}`, after `[TOOL_CALLS]`."""
    yield from reader.skip_spaces()
    if (yield from reader.follows("[")):
        yield from read_call_list(reader, calls)
        return
    calls.begin((yield from reader.read_word(_NAME)))
    if (yield from reader.skip("[CALL_ID]")):
        yield from reader.read_word(_NAME)
    yield from reader.skip("[ARGS]")
    yield from reader.skip_spaces()
    yield from _read_arguments(reader, calls.add)
    calls.end(reader)


def read_deepseek(reader: TextReader, calls: Calls) -> Reading[None]:
    """Read a call after `<｜tool▁call▁begin｜>`.

    DeepSeek V3 writes `function<｜tool▁sep｜>NAME`, a line break and the arguments in a JSON fence.
    V3.1 writes `NAME<｜tool▁sep｜>` and the arguments.
    """
    name = yield from reader.read_word(_NAME)
    yield from reader.expect("<｜tool▁sep｜>")
    is_fenced = name == "function" and not (yield from reader.follows("{"))
    if is_fenced:
        name = yield from reader.read_word(_NAME)
        yield from reader.skip_spaces()
        yield from reader.expect("```json")
    calls.begin(name)
    yield from reader.skip_spaces()
    yield from _read_arguments(reader, calls.add)
    yield from reader.skip_spaces()
    if is_fenced:
        yield from reader.skip("```")
    yield from reader.skip("<｜tool▁call▁end｜>")
    calls.end(reader)


def read_gptoss(reader: TextReader, calls: Calls) -> Reading[None]:
    """Read `NAME <|constrain|>json<|message|>{...}` after `to=functions.`.

    `<|channel|>commentary` stands before the name, or between the name and the message.
    """
    name = yield from reader.read_word(_NAME)
    for part in ("<|channel|>commentary", "<|constrain|>", "json"):
        yield from reader.skip_spaces()
        yield from reader.skip(part)
    yield from reader.expect("<|message|>")
    calls.begin(name)
    yield from reader.skip_spaces()
    yield from _read_arguments(reader, calls.add)
    calls.end(reader)


_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def read_pythonic(reader: TextReader, calls: Calls) -> Reading[None]:
    """Read `[name(key=value), ...]`, with Python literals as values."""
    yield from reader.need()
    text = yield from _read_brackets(reader)
    try:
        parsed = ast.parse(text, mode="eval").body
        found = [_python_call(call) for call in getattr(parsed, "elts", [])]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise BadSyntaxError from None
    if not found or not {name for name, _ in found} <= set(calls.tools):
        raise BadSyntaxError
    for name, arguments in found:
        calls.begin(name)
        calls.add(arguments)
        calls.end(reader)


def _python_call(call: ast.expr) -> tuple[str, str]:
    """Return the name and the arguments of a call.

    Raises:
        ValueError: the expression is not a call, or a value is not a literal.
    """
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with keywords")
    arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    if None in arguments:
        raise ValueError("**")
    return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _read_brackets(reader: TextReader) -> Reading[str]:
    """Read a text in brackets, and return it. Brackets inside Python strings do not count."""
    text, closing = "", [""]
    quote = ""
    while True:
        character = yield from reader.peek()
        if not character:
            raise EndOfTextError
        if len(text) > MAX_PYTHONIC_LENGTH:
            raise BadSyntaxError
        yield from reader.expect(character)
        text += character
        if quote:
            if character == "\\":
                yield from reader.need()
                escaped = yield from reader.peek()
                yield from reader.expect(escaped)
                text += escaped
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _BRACKETS:
            closing.append(_BRACKETS[character])
        elif character == closing[-1]:
            closing.pop()
            if len(closing) == 1:
                return text
        elif character in ")]}" or len(closing) == 1:
            raise BadSyntaxError


class ToolLayout(msgspec.Struct, frozen=True):
    """The texts around the tool calls of a reply, from which the reply's grammar is built.

    Args:
        open: begins the calls.
        begin: precedes the arguments of a call. NAME stands for the tool's name.
        end: follows the arguments.
        between: separates two calls. Empty: a reply has one call at most.
        close: ends the calls.
        content: begins a reply without calls.
    """

    open: str
    begin: str
    end: str
    between: str
    close: str
    content: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes tool calls.

    Args:
        markers: the texts that begin calls. Empty: calls stand at the start of the reply, without a
            marker.
        read: reads the calls after a marker.
        layout: the texts around the calls. None: no grammar describes the format.
        ignored: texts around the calls that are neither calls nor content.
    """

    markers: tuple[str, ...]
    read: Callable[[TextReader, Calls], Reading[None]]
    layout: ToolLayout | None
    ignored: tuple[str, ...] = ()

    def special_texts(self) -> list[str]:
        """Return the texts of the format that are special tokens in some tokenizers."""
        layout = () if self.layout is None else msgspec.structs.astuple(self.layout)
        return SPECIAL_TEXT.findall("".join((*self.markers, *self.ignored, *layout, "[CALL_ID]")))

    @property
    def marks_content(self) -> bool:
        """Whether a marker of the format also begins the content of a reply without calls."""
        return self.layout is not None and bool(self.layout.content)


_JSON_BEGIN = '{"name": "NAME", "arguments": '
_DEEPSEEK_OPEN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_CLOSE = "<｜tool▁calls▁end｜>"

#: By the name that `toolParser` takes.
TOOL_FORMATS = {
    "hermes": ToolFormat(
        ("<tool_call>",),
        read_hermes,
        ToolLayout(
            "<tool_call>",
            f"\n{_JSON_BEGIN}",
            "}",
            "\n</tool_call>\n<tool_call>",
            "\n</tool_call>",
        ),
    ),
    "llama3_json": ToolFormat(
        (),
        read_llama3,
        ToolLayout("", '{"name": "NAME", "parameters": ', "}", "; ", ""),
        ("<|python_tag|>",),
    ),
    "pythonic": ToolFormat((), read_pythonic, None, ("<|python_start|>", "<|python_end|>")),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",), read_mistral, ToolLayout("[TOOL_CALLS] [", _JSON_BEGIN, "}", ", ", "]")
    ),
    "mistral_args": ToolFormat(
        ("[TOOL_CALLS]",),
        read_mistral,
        ToolLayout("[TOOL_CALLS]", "NAME[ARGS]", "", "[TOOL_CALLS]", ""),
    ),
    "deepseek_v3": ToolFormat(
        (_DEEPSEEK_CALL,),
        read_deepseek,
        ToolLayout(
            _DEEPSEEK_OPEN + _DEEPSEEK_CALL,
            "function<｜tool▁sep｜>NAME\n```json\n",
            f"\n```{_DEEPSEEK_END}",
            f"\n{_DEEPSEEK_CALL}",
            _DEEPSEEK_CLOSE,
        ),
        (_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE),
    ),
    "deepseek_v31": ToolFormat(
        (_DEEPSEEK_CALL,),
        read_deepseek,
        ToolLayout(
            _DEEPSEEK_OPEN + _DEEPSEEK_CALL,
            "NAME<｜tool▁sep｜>",
            _DEEPSEEK_END,
            _DEEPSEEK_CALL,
            _DEEPSEEK_CLOSE,
        ),
        (_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE),
    ),
    "gptoss": ToolFormat(
        ("<|channel|>commentary to=functions.", "to=functions."),
        read_gptoss,
        ToolLayout(
            "<|channel|>commentary to=functions.",
            "NAME <|constrain|>json<|message|>",
            "",
            "",
            "",
            "<|channel|>final<|message|>",
        ),
        (
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|call|>",
            "<|end|>",
            "<|return|>",
        ),
    ),
    "json": ToolFormat((), read_json, ToolLayout("[", _JSON_BEGIN, "}", ", ", "]")),
}
