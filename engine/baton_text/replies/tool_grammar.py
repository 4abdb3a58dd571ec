"""The grammar of a reply that may or must contain tool calls, in llguidance's form of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from baton_protocol.sampling import JSON_FORMAT
from baton_text.replies.reasoning import ReasoningFormat
from baton_text.replies.tool_formats import SPECIAL_TEXT, ToolFormat

#: Schema of the arguments of a tool that declares none.
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
#: Keywords of JSON schemas with texts for readers, and keywords whose values are no schemas.
_NOTES = frozenset(("$comment", "description", "title"))
_VALUES = frozenset(("const", "default", "enum", "examples"))


def tool_grammar(
    tool_format: ToolFormat,
    tools: Sequence[tuple[str, dict[str, Any]]],
    *,
    is_required: bool,
    is_single: bool,
    content_schema: dict[str, Any] | None,
    reasoning: ReasoningFormat | None,
    is_reasoning: bool,
    special_token_id: Callable[[str], int | None],
) -> str | None:
    """Return the grammar of a reply, or None if the format has no grammar for it.

    Calls are then complete, and their arguments follow the schema of the tool. Text outside the
    calls is free. With a `content_schema`, a reply is either calls or JSON of this schema.

    Args:
        tool_format: how the model writes calls.
        tools: name and JSON schema of each tool that may be called.
        is_required: the reply is one call or more, without content.
        is_single: at most one call.
        content_schema: JSON schema of a reply without calls; None: any text.
        reasoning: how the model writes its reasoning, which precedes calls; None: it writes none.
        is_reasoning: the prompt ends inside the reasoning.
        special_token_id: returns the id of a special token. None: the text is no special token.
    """
    layout = tool_format.layout
    if layout is None or not (is_required or content_schema is not None or tool_format.markers):
        return None

    def parts(text: str) -> list[str]:
        """Return a text as terminals of Lark. A grammar must name special tokens by their ids."""
        found: list[str] = []
        plain = ""
        for part in re.split(f"({SPECIAL_TEXT.pattern})", text):
            token_id = special_token_id(part)
            if token_id is None:
                plain += part
                continue
            found += [_quoted(plain), f"<[{token_id}]>"]
            plain = ""
        return [part for part in (*found, _quoted(plain)) if part]

    def literal(text: str) -> str:
        return " ".join(parts(text))

    def up_to(rule: str, text: str) -> str:
        """Return the rule for any text up to the first `text`, and this text."""
        first, *rest = parts(text)
        if first.startswith("<"):
            return f"{rule}: TEXT {' '.join([first, *rest])}\n"
        return f"{rule}_start[lazy]: TEXT {first}\n{rule}: {' '.join([f'{rule}_start', *rest])}\n"

    more = "" if is_single else f"({literal(layout.between)} call)*"
    calls = f"call {more} {literal(layout.close)}"
    lines = ["%llguidance {}\n"]
    prefix = ""
    if reasoning is not None:
        lines.append(up_to("thinking", reasoning.end))
        start = literal(reasoning.start)
        prefix = "thinking SPACES" if is_reasoning else f"({start} thinking SPACES)?"
        lines.append("SPACES: /[ \\n]{0,4}/\n")
    if is_required or content_schema is not None:
        content = "" if is_required or content_schema is None else f"| {_json(content_schema)}"
        lines.append(f"start: {prefix} ({literal(layout.open)} {calls} {content})\n")
    else:
        lines.append(f"start: {prefix} section{'?' if is_single else '*'} TEXT\n")
        lines.append(up_to("opening", layout.open))
        lines.append(f"section: opening {calls}\n")
    lines.append("TEXT: /(.|\\n)*/\n")
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))) + "\n")
    for number, (name, schema) in enumerate(tools):
        begin = literal(layout.begin.replace("NAME", name))
        lines.append(f"call_{number}: {begin} {_json(schema)} {literal(layout.end)}\n")
    return "".join(lines)


def _json(schema: dict[str, Any]) -> str:
    schema = {**_without_notes(schema), "x-guidance": JSON_FORMAT}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _without_notes(schema: Any) -> Any:
    """Return a JSON schema without its texts for readers, which are often most of it.

    A property may have the name of a keyword. Its value is then a schema and no text.
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


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
