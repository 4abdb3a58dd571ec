"""Structured outputs with vLLM's field names, and the token sequences of bad words."""

from __future__ import annotations

import json as jsonlib
from typing import Any

import msgspec

from baton_protocol.sampling_params import (
    MAX_BAD_WORDS,
    MAX_SPEC_LENGTH,
    StructuredOutput,
    StructuredOutputKind,
)
from baton_text.tokenizer import Tokenizer

#: Maximum number of bad words. A word may need two token sequences: one at the start of a text, and
#: one after a space.
MAX_WORDS = MAX_BAD_WORDS // 2
#: Limit on the characters of all bad words.
MAX_WORD_CHARACTERS = 2**14


class StructuredOutputsParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The structure that a text must have. At most one field may be set.

    The names of the fields are the values of `StructuredOutputKind`.
    """

    #: A JSON schema, as an object or as its text.
    json: dict[str, Any] | str | bool | None = None
    #: A regular expression that the whole text matches.
    regex: str | None = None
    #: The allowed texts.
    choice: list[str] | None = None
    #: A context-free grammar in Lark's or GBNF's notation.
    grammar: str | None = None
    #: True: any JSON object.
    json_object: bool | None = None

    def given(self) -> list[str]:
        """Return the names of the fields that are set.

        False counts as unset, except in `json`, where False is a schema.
        """
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return [
            name
            for name, value in fields.items()
            if value is not None and not (value is False and name != "json")
        ]

    def to_structured_output(self) -> StructuredOutput | None:
        """Return the structure in the engine's form, or None if no field is set.

        Raises:
            ValueError: several fields are set, or a field is invalid. The message begins with the
                name of an invalid field.
        """
        given = self.given()
        if not given:
            return None
        if len(given) > 1:
            raise ValueError(
                f"{given[1]} cannot be combined with {given[0]}: a text can have only one structure"
            )
        kind, value = StructuredOutputKind(given[0]), getattr(self, given[0])
        if kind is StructuredOutputKind.JSON_OBJECT:
            return StructuredOutput(kind)
        if kind is StructuredOutputKind.JSON:
            return StructuredOutput(kind, _schema_text(value))
        if kind is StructuredOutputKind.CHOICE and not value:
            raise ValueError("choice must hold at least one string")
        _check_length(kind, len("".join(value)))
        is_list = kind is StructuredOutputKind.CHOICE
        return StructuredOutput(kind, jsonlib.dumps(value) if is_list else value)


def _check_length(kind: StructuredOutputKind, length: int) -> None:
    """Raise ValueError if a specification is too long.

    `StructuredOutput.validate` checks the length again, but only after the specification has been
    parsed and converted.
    """
    if length > MAX_SPEC_LENGTH:
        raise ValueError(f"{kind.value} must have at most {MAX_SPEC_LENGTH} characters")


def _schema_text(schema: dict[str, Any] | str | bool) -> str:
    if not isinstance(schema, str):
        try:
            _check_length(StructuredOutputKind.JSON, len(msgspec.json.encode(schema)))
            return jsonlib.dumps(schema)
        except RecursionError as error:
            raise ValueError("json is nested too deeply") from error
    _check_length(StructuredOutputKind.JSON, len(schema))
    try:
        jsonlib.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json must be a JSON schema, but it is not JSON: {error}") from error
    return schema


def check_bad_words(words: list[str]) -> None:
    """Check the number and the lengths of bad words.

    Raises:
        ValueError: there are too many words or characters, or a word is empty.
    """
    if len(words) > MAX_WORDS:
        raise ValueError(f"bad_words must have at most {MAX_WORDS} words, got {len(words)}")
    for word in words:
        if not word.strip():
            raise ValueError("bad_words must not hold an empty string")
    if sum(map(len, words)) > MAX_WORD_CHARACTERS:
        raise ValueError(
            f"bad_words must have at most {MAX_WORD_CHARACTERS} characters together, "
            f"got {sum(map(len, words))}"
        )


def bad_words_token_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Return the token sequences that must not be generated.

    The first sequence of a bad word has the word's tokens at the start of a text. The second has
    the tokens of a space and the word. It is left out if it ends with the first sequence.

    Raises:
        ValueError: there are too many words or characters, or a word is empty.
    """
    check_bad_words(words)
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        start = tokenizer.encode(bare, add_special_tokens=False)
        sequences.append(start)
        spaced = tokenizer.encode(" " + bare, add_special_tokens=False)
        # If the space is a separate token, the sequence without it also matches after a space.
        if spaced[-len(start) :] != start:
            sequences.append(spaced)
    return sequences
