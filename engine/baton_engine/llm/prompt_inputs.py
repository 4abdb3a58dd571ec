"""The forms of prompts and conversations that `LLM` takes, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

import msgspec

from baton_engine.llm.collectors import Prompt
from baton_text.chat_messages import ChatMessage, template_messages
from baton_text.chat_template import ChatTemplate
from baton_text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt
#: OpenAI's form: `role` and `content`. Other fields are passed to the model's chat template.
Message = dict[str, Any]


def prompt_list(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """Return the prompts as a list. A single prompt becomes a list of one.

    Raises:
        TypeError: `prompts` is neither a prompt nor a list.
    """
    given: Any = prompts
    if isinstance(given, str | dict):
        return [cast(PromptType, given)]
    if not isinstance(given, list | tuple):
        raise TypeError(
            "prompts must be a text, a list of token ids, or a list of these, "
            f"got {type(given).__name__}"
        )
    if given and all(isinstance(item, int) for item in given):
        return [cast(list[int], given)]
    return given


def tokenize(tokenizer: Tokenizer, prompt: PromptType, index: int) -> Prompt:
    """Return the prompt as token ids.

    Args:
        index: position in the caller's list, for error messages.

    Raises:
        TypeError: the prompt is neither a text nor a list of token ids.
        ValueError: the prompt is empty, or its text cannot be encoded.
    """
    given: Any = prompt  # not checked yet
    if isinstance(given, dict):
        if not {"prompt", "prompt_token_ids"} & given.keys():
            raise TypeError(
                f"prompt {index} must have prompt or prompt_token_ids, "
                f"got {', '.join(map(repr, given))}"
            )
        given = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(given, str):
        try:
            tokenized = Prompt(tokenizer.encode(given), given)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    elif isinstance(given, list | tuple) and all(type(token_id) is int for token_id in given):
        tokenized = Prompt(list(given), None)
    else:
        raise TypeError(
            f"prompt {index} must be a text or a list of token ids (int), got {_type_name(given)}"
        )
    if not tokenized.token_ids:
        raise ValueError(f"prompt {index} is empty: it needs one token at least")
    return tokenized


def pair_list(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of a text in `data_1` and the text at the same position in `data_2`.

    If `data_1` has a single text, it is paired with each text in `data_2`.

    Raises:
        TypeError: an argument is neither a text nor a list of texts.
        ValueError: `data_2` is empty, or `data_1` has neither one text nor as many as `data_2`.
    """
    first, second = ([data] if isinstance(data, str) else data for data in (data_1, data_2))
    for name, texts in (("data_1", first), ("data_2", second)):
        given: Any = texts
        if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
            raise TypeError(f"{name} must be a text or a list of texts")
    if len(first) == 1:
        first = list(first) * len(second)
    if not second or len(first) != len(second):
        raise ValueError(
            "data_1 must have one text, or as many texts as data_2: got "
            f"{len(first)} and {len(second)}"
        )
    return list(zip(first, second, strict=True))


def as_conversations(messages: Any) -> Sequence[Sequence[Message]]:
    """Return the conversations as a list. A single conversation becomes a list of one.

    Raises:
        TypeError: `messages` is neither a conversation nor a list of conversations.
        ValueError: a conversation is empty.
    """
    if not isinstance(messages, list | tuple):
        raise TypeError(
            "messages must be a list of messages, or of conversations, "
            f"got {type(messages).__name__}"
        )
    if messages and isinstance(messages[0], dict):
        messages = [messages]
    for index, conversation in enumerate(messages):
        if not isinstance(conversation, list | tuple):
            raise TypeError(
                f"conversation {index} must be a list of messages like "
                f"{{'role': 'user', 'content': 'Hello'}}, got {type(conversation).__name__}"
            )
        if not conversation:
            raise ValueError(f"conversation {index} is empty: it needs one message at least")
    return cast(Sequence[Sequence[Message]], messages)


def render_conversation(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    conversation: Sequence[Message],
    variables: Mapping[str, Any],
) -> Prompt:
    """Render a conversation with the chat template, and tokenize the result.

    Args:
        variables: variables of the template besides `messages`.

    Raises:
        ValueError: a message is invalid, or the template rejects the messages.
    """
    try:
        messages = template_messages(msgspec.convert(list(conversation), list[ChatMessage]))
    except msgspec.ValidationError as error:
        raise ValueError(f"messages: {error}") from error
    text = template.render(messages, **variables)
    return Prompt(tokenizer.encode(text, add_special_tokens=False), text)


def _type_name(given: object) -> str:
    """Return the name of a value's type. For a list, add the type of the first non-int item."""
    if isinstance(given, list | tuple):
        item_type = next(type(item).__name__ for item in given if type(item) is not int)
        return f"a {type(given).__name__} with {item_type}"
    return type(given).__name__
