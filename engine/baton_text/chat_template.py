"""Renders chat messages to a prompt text, in the same Jinja environment as `transformers`.

Templates come from checkpoints, which are untrusted. Therefore templates run in Jinja's immutable
sandbox, on plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_RENDER_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class ChatTemplateError(ValueError):
    """Raised when the chat template refuses the messages or cannot render them."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source text.
        special_tokens: texts of special tokens by the name of the template variable (`bos_token`).

    Raises:
        ValueError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Render messages to a prompt text.

        The prompt text contains its special tokens. Encode the text with add_special_tokens=False.

        Args:
            messages: plain JSON values, each with `role` and `content`.
            add_generation_prompt: append the beginning of the assistant's turn.
            variables: further template variables, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the template refuses the messages or cannot render them.
        """
        values: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **variables,
        }
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except _RENDER_FAILURES as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error


class _GenerationBlock(Extension):
    """The Jinja tag `{% generation %}`, which marks assistant text for training.

    Rendering ignores the tag and keeps the text inside the tag.
    """

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
