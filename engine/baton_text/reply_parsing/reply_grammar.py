"""The grammar of a reply with reasoning or tool calls, in llguidance's form of Lark.

Text, tool calls or a structured output follow the reasoning, if the model writes any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from baton_protocol.sampling_params import JSON_FORMAT, StructuredOutput, StructuredOutputKind
from baton_text.reply_parsing.reasoning import ReasoningFormat
from baton_text.reply_parsing.tool_formats import SPECIAL_TEXT, ToolFormat

#: Schema of the arguments of a tool that declares none.
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
#: Keywords of JSON schemas with texts for readers, and keywords whose values are not schemas.
_NOTES = frozenset(("$comment", "description", "title"))
_VALUES = frozenset(("const", "default", "enum", "examples"))
#: An escaped character, a slash or a line break in a regular expression.
_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)


class ReplyGrammar:
    """Writes the grammar of one reply. Each grammar begins with the reasoning, if there is any.

    Args:
        reasoning: how the model writes its reasoning; None: it writes none.
        is_reasoning: the prompt ends inside the reasoning.
        thinking_budget: maximum number of tokens of the reasoning. After these tokens, the grammar
            closes the reasoning and allows no further reasoning in the reply. None: no limit.
        special_token_id: returns the id of a special token, and None for any other text.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        *,
        is_reasoning: bool,
        thinking_budget: int | None,
        special_token_id: Callable[[str], int | None],
    ) -> None:
        self._reasoning = reasoning
        self.is_reasoning = is_reasoning
        self._budget = thinking_budget
        self._special_token_id = special_token_id

    @property
    def limits_reasoning(self) -> bool:
        return self._reasoning is not None and self._budget is not None

    def text(self, tool_format: ToolFormat | None) -> str:
        """Return a grammar of free text.

        If `tool_format` has a text that begins the content, the grammar requires this text at the
        beginning. Otherwise, the grammar also allows the special tokens of `tool_format`.
        """
        layout = None if tool_format is None else tool_format.layout
        if layout is not None and layout.content:
            return self._grammar(f"{self._literal(layout.content)} TEXT")
        texts = [] if tool_format is None else tool_format.special_texts()
        ids = {self._special_token_id(text) for text in texts} - {None}
        special = " | ".join(f"<[{token_id}]>" for token_id in sorted(map(str, ids)))
        return self._grammar(f"TEXT (({special}) TEXT)*" if special else "TEXT")

    def structured(self, output: StructuredOutput, tool_format: ToolFormat) -> str:
        """Return the grammar of a structured output of any kind except GRAMMAR."""
        lines = []
        match output.kind:
            case StructuredOutputKind.JSON:
                body = _json(json.loads(output.spec))
            case StructuredOutputKind.JSON_OBJECT:
                body = _json(ANY_ARGUMENTS)
            case StructuredOutputKind.CHOICE:
                body = "CHOICE"
                texts = " | ".join(_quoted(text) for text in json.loads(output.spec))
                lines.append(f"CHOICE: {texts}\n")
            case _:
                body = f"/{_ESCAPE.sub(_escaped, output.spec)}/"
        content = "" if tool_format.layout is None else self._literal(tool_format.layout.content)
        return self._grammar(f"{content} {body}", *lines)

    def calls(
        self,
        tool_format: ToolFormat,
        tools: Sequence[tuple[str, dict[str, Any]]],
        *,
        is_required: bool,
        is_single: bool,
        content_schema: dict[str, Any] | None,
    ) -> str | None:
        """Return the grammar of a reply that may have tool calls; None if it is not constrained.

        The grammar makes calls complete, and their arguments follow the schema of the tool. Text
        outside the calls is free. With a `content_schema`, a reply is either calls or JSON of this
        schema.

        Args:
            tool_format: how the model writes calls.
            tools: name and JSON schema of each tool that may be called.
            is_required: the reply is one call or more, without content.
            is_single: at most one call.
            content_schema: JSON schema of a reply without calls; None: any text.
        """
        layout = tool_format.layout
        if layout is None:
            return None
        if is_required:
            content = ""
        elif content_schema is not None:
            content = f"| {self._literal(layout.content)} {_json(content_schema)}"
        elif layout.content and self.limits_reasoning:
            content = f"| {self._literal(layout.content)} TEXT"
        elif layout.content or not tool_format.markers:
            return None
        else:
            content = "TEXT"
        literal = self._literal
        more = f"({literal(layout.between)} call)*" if layout.between and not is_single else ""
        calls = f"call {more} {literal(layout.close)}"
        names = " | ".join(f"call_{number}" for number in range(len(tools)))
        lines = [f"call: {names}\n"]
        for number, (name, schema) in enumerate(tools):
            begin = literal(layout.begin.replace("NAME", name))
            lines.append(f"call_{number}: {begin} {_json(schema)} {literal(layout.end)}\n")
        markers = tool_format.markers
        if content != "TEXT":
            body = f"({literal(layout.open)} {calls} {content})"
            return self._grammar(body, *lines, markers=markers)
        lines += [self._up_to("opening", "TEXT", layout.open), f"section: opening {calls}\n"]
        body = f"section{'?' if is_single else '*'} TEXT"
        return self._grammar(body, *lines, markers=markers)

    def _grammar(self, body: str, *lines: str, markers: Sequence[str] = ()) -> str:
        """Return the grammar of a reply: the reasoning, then `body`.

        Args:
            body: right-hand side of the rule for the text after the reasoning.
            lines: definitions of the rules and terminals in `body`.
            markers: texts that the terminal TEXT must not contain, because the parser reads a call
                after each of them.
        """
        reasoning, prefix = self._reasoning, ""
        excluded = list(markers)
        head = ["%llguidance {}\n", "ANY: /(.|\\n)*/\n"]
        if reasoning is not None:
            start, following = self._literal(reasoning.start), self._literal(reasoning.next)
            prefix = f"thinking {following} SPACES"
            if not self.is_reasoning:
                prefix = f"({start} {prefix})?"
            head += [self._thinking(reasoning.end), "SPACES: /[ \\n]{0,4}/\n"]
            if self._budget is not None:
                excluded.append(reasoning.start)
        # Special tokens are never part of TEXT, so only plain texts need to be excluded.
        plain = [_quoted(each) for each in excluded if self._parts(each) == [_quoted(each)]]
        text = f"ANY & ~(ANY ({' | '.join(plain)}) ANY)" if plain else "ANY"
        return "".join([*head, f"TEXT: {text}\n", f"start: {prefix} {body}\n", *lines])

    def _thinking(self, end: str) -> str:
        """Return the rules that match the rest of the reasoning and its end marker."""
        first, *rest = self._parts(end)
        closing = " ".join([first, *rest])
        if self._budget is None:
            return self._up_to("thinking", "ANY", end)
        if self._budget == 0:
            return f"thinking: {closing}\n"
        limit = f"max_tokens={self._budget}"
        cut = f"thinking_cut[{limit}]: ANY\n"
        if first.startswith("<"):
            return f"{cut}thinking: thinking_cut {closing}\n"
        whole = f"thinking_whole[lazy, {limit}]: ANY {first}\n"
        following = " ".join(rest)
        # After `limit` tokens, the library ends the terminal that it has seen first, even if the
        # terminal does not match.
        return f"{cut}{whole}thinking: (thinking_cut {first} | thinking_whole) {following}\n"

    def _up_to(self, rule: str, text: str, end: str) -> str:
        """Return the definition of a rule that matches a text up to and including its first `end`.

        Args:
            rule: name of the rule.
            text: terminal that matches the text before `end`.
            end: text that ends the match.
        """
        first, *rest = self._parts(end)
        if first.startswith("<"):
            return f"{rule}: {text} {' '.join([first, *rest])}\n"
        return f"{rule}_start[lazy]: {text} {first}\n{rule}: {' '.join([f'{rule}_start', *rest])}\n"

    def _literal(self, text: str) -> str:
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        """Return Lark terminals that match `text`. A special token is written as its id."""
        found: list[str] = []
        plain = ""
        for part in re.split(f"({SPECIAL_TEXT.pattern})", text):
            token_id = self._special_token_id(part)
            if token_id is None:
                plain += part
                continue
            found += [_quoted(plain), f"<[{token_id}]>"]
            plain = ""
        return [part for part in (*found, _quoted(plain)) if part]


def _json(schema: Any) -> str:
    schema = _without_notes(schema)
    # The option x-guidance is a key of the schema's object, but true and false are also schemas.
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_FORMAT}, ensure_ascii=False)}"


def _without_notes(schema: Any) -> Any:
    """Return a JSON schema without titles, descriptions and comments, to make it shorter.

    A property may be named like one of these keywords. Such a property is kept.
    """
    if isinstance(schema, list):
        return [_without_notes(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUES else _without_notes(value)
        for key, value in schema.items()
        if not (key in _NOTES and isinstance(value, str))
    }


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
