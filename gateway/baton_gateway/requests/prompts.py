"""Converts messages and texts to token ids, and checks limits on their length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton_gateway import thread_pool
from baton_gateway.errors import prompt_too_long, unavailable
from baton_gateway.thread_pool import run_template
from baton_protocol.pooling_params import PairFormat
from baton_text.chat_messages import ChatMessage, template_messages
from baton_text.chat_template import ChatTemplateError, TemplateProcessError
from baton_text.request_error import RequestError
from baton_text.score_prompts import PairPrompt, encode_pair
from baton_text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger(__name__)

#: A text with more than this many characters per allowed token is first tokenized in pieces. A
#: text that cannot fit is then refused before all of it was tokenized.
LONG_TEXT = 8
#: Limit on the characters of a text per allowed token. The tokens of a text are shorter on average,
#: unless the text repeats characters.
MAX_CHARACTERS_PER_TOKEN = 32
#: Limit on the characters of a text. If LONG_TEXT characters per token of the longest prompt are
#: more, this larger number is the limit. Byte-level BPE takes 75 to 170 bytes of memory for each
#: byte of a text.
MAX_TEXT_CHARACTERS = 2**22
#: A text to tokenize may have this many times the tokens of the longest prompt.
TEXT_FACTOR = 4
#: Minimum number of characters of a piece. A cut changes only the tokens of the words beside it, so
#: pieces must be long compared with words.
_MIN_PIECE = 4096


@dataclass(frozen=True)
class PromptBounds:
    """Limits on the number of tokens of a prompt.

    Args:
        max_model_len: the model's limit on tokens of prompt and answer together.
        max_prompt_tokens: the limit configured for this server; None: no limit.
        room: number of tokens that the prompt must leave for the answer; 0 for a pooling model.
    """

    max_model_len: int
    max_prompt_tokens: int | None = None
    room: int = 1

    @property
    def max_tokens(self) -> int:
        limit = self.max_prompt_tokens
        return self.max_model_len if limit is None else min(self.max_model_len, limit)

    @property
    def max_characters(self) -> int:
        return _max_characters(self.max_tokens, self)

    def check(self, at_least: int, field: str) -> None:
        """Raise an error if a prompt is too long.

        Args:
            at_least: lower bound of the prompt's number of tokens.
            field: field of the request, for the error message.

        Raises:
            APIError: the prompt does not fit the model.
            RequestError: the prompt is longer than this server's limit.
        """
        if at_least > self.max_model_len - self.room:
            raise prompt_too_long(self.max_model_len, at_least, field)
        self.check_server_limit(at_least, field)

    def check_server_limit(self, at_least: int, field: str) -> None:
        """Raise RequestError if a prompt is longer than this server's limit.

        `at_least` is a lower bound of the prompt's number of tokens.
        """
        if self.max_prompt_tokens is not None and at_least > self.max_prompt_tokens:
            raise RequestError(
                f"this server accepts prompts of at most {self.max_prompt_tokens} tokens, "
                f"got {at_least} or more",
                param=field,
                code="prompt_too_long",
            )


@dataclass(frozen=True)
class TextBounds:
    """Limit on the number of tokens of a text to tokenize or detokenize.

    The limit is higher than the limit of a prompt. Clients tokenize texts that are too long for a
    prompt, in order to shorten them.
    """

    prompt: PromptBounds

    @property
    def max_tokens(self) -> int:
        return TEXT_FACTOR * self.prompt.max_tokens

    @property
    def max_characters(self) -> int:
        return _max_characters(self.max_tokens, self.prompt)

    def check(self, at_least: int, field: str) -> None:
        """Raise RequestError if a text is too long.

        `at_least` is a lower bound of the text's number of tokens.
        """
        if at_least > self.max_tokens:
            raise RequestError(
                f"{field} may have at most {self.max_tokens} tokens, which is {TEXT_FACTOR} times "
                f"the limit of a prompt, got {at_least} or more",
                param=field,
                code="prompt_too_long",
            )


class PromptReader:
    """Renders and tokenizes prompts.

    Methods that are not coroutines may be called from any thread. The limits on the length of texts
    also limit the duration of a call.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def render(
        self,
        messages: list[ChatMessage],
        variables: dict[str, Any] | None,
        bounds: PromptBounds | TextBounds,
        *,
        add_generation_prompt: bool,
        size: int,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Return the prompt that the chat template renders from `messages`.

        Args:
            messages: the conversation.
            variables: further variables of the template; None: no further variables.
            bounds: limit on the tokens of the prompt. Messages are refused before rendering if
                they are too many, or have too many characters, for this limit.
            add_generation_prompt: end the prompt with the start of an assistant's message.
            size: bytes of the request's body.
            tools: tools that the answer may call; None: no tools.

        Raises:
            RequestError: the model has no chat template, the template refuses the messages, or a
                variable has the name of a field of the request.
            APIError, RequestError: the messages exceed `bounds`.
            APIError: 503, rendering takes too long, including the wait for other requests, or the
                process that renders the template ends unexpectedly.
        """
        variables = variables or {}
        if reserved := {"messages", "add_generation_prompt", "tools"} & variables.keys():
            name = f"chat_template_kwargs.{min(reserved)}"
            raise RequestError(f"{name} cannot be set: it is a field of the request", param=name)
        bounds.check(len(messages), "messages")
        bounds.check(self._tokenizer.fewest_tokens(_num_characters(messages)), "messages")
        template = self._tokenizer.chat_template
        if template is None:
            raise RequestError(
                "This model has no chat template; send a prompt instead, or add "
                "chat_template.jinja to the checkpoint.",
                param="messages",
            )

        def work() -> str:
            return template.render(
                template_messages(messages),
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **variables,
            )

        try:
            return await run_template(work, size)
        except ChatTemplateError as error:
            raise RequestError(
                f"The chat template refuses these messages: {error}", param="messages"
            ) from error
        except TemplateProcessError as error:
            logger.warning("a chat request failed: %s; the client gets 503 and can retry", error)
            raise unavailable(f"{error}. Retry the request.") from error
        except TimeoutError:
            logger.warning(
                "a chat request was not rendered within %g s, because the chat templates of other "
                "requests take too long; the client gets 503 and can retry",
                thread_pool.TEMPLATE_TIMEOUT_S,
            )
            raise unavailable(
                "The chat templates of other requests take too long; retry later."
            ) from None

    def token_ids(
        self,
        prompt: str | list[int],
        field: str,
        bounds: PromptBounds,
        *,
        add_special_tokens: bool,
    ) -> list[int]:
        """Return the token ids of `prompt`: tokenize a text, or check given token ids.

        Raises:
            APIError, RequestError: `encode` refuses the text.
            RequestError: an id is not in the vocabulary.
        """
        if isinstance(prompt, str):
            return self.encode(prompt, field, bounds, add_special_tokens=add_special_tokens)
        self.check_ids(prompt, field)
        return prompt

    def encode(
        self, text: str, field: str, bounds: PromptBounds | TextBounds, *, add_special_tokens: bool
    ) -> list[int]:
        """Return the token ids of `text`. The caller must compare their number with `bounds`.

        Raises:
            APIError, RequestError: a quick check shows that the text exceeds `bounds`.
            RequestError: the model's tokenizer fails for this text.
        """
        try:
            self._check_text(text, field, bounds)
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise RequestError(
                f"The model's tokenizer cannot process {field}: {error}", param=field
            ) from error

    def encode_pair(
        self,
        pair_format: PairFormat,
        pair: tuple[str, str],
        fields: tuple[str, str],
        bounds: PromptBounds,
    ) -> PairPrompt:
        """Return the prompt that contains both texts of `pair`.

        The caller must compare its number of tokens with `bounds`.

        Args:
            fields: for each text, the field of the request, for error messages.

        Raises:
            APIError, RequestError: in the same cases as `encode`.
        """
        try:
            for text, field in zip(pair, fields, strict=True):
                self._check_text(text, field, bounds)
            return encode_pair(self._tokenizer, pair_format, *pair)
        except TokenizerError as error:
            raise RequestError(
                f"The model's tokenizer cannot process {fields[1]}: {error}", param=fields[1]
            ) from error

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raise RequestError if an id is not in the vocabulary."""
        vocab_size = self._tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise RequestError(
                f"{field}: token ids must be in [0, {vocab_size - 1}], got {wrong}", param=field
            )

    def _check_text(self, text: str, field: str, bounds: PromptBounds | TextBounds) -> None:
        """Raise an error if a quick check shows that `text` exceeds `bounds`.

        A long text is tokenized in pieces. The text is refused as soon as the pieces have more than
        twice the allowed tokens. The factor 2 is a margin, because a cut between two pieces may add
        a few tokens.
        """
        bounds.check(self._tokenizer.fewest_tokens(len(text)), field)
        if len(text) > bounds.max_characters:
            raise RequestError(
                f"{field} may have at most {bounds.max_characters} characters, got {len(text)}",
                param=field,
                code="prompt_too_long",
            )
        if len(text) <= LONG_TEXT * bounds.max_tokens:
            return
        num_tokens, piece = 0, max(_MIN_PIECE, LONG_TEXT * bounds.max_tokens)
        for start in range(0, len(text), piece):
            num_tokens += len(
                self._tokenizer.encode(text[start : start + piece], add_special_tokens=False)
            )
            if num_tokens > 2 * bounds.max_tokens + 1:
                bounds.check(num_tokens // 2, field)


def _max_characters(max_tokens: int, prompt: PromptBounds) -> int:
    """Return the limit on the characters of a text that may have up to `max_tokens` tokens.

    The limit bounds the memory of the tokenizer, and grows with the context length of the model.
    """
    return min(
        MAX_CHARACTERS_PER_TOKEN * max_tokens,
        max(MAX_TEXT_CHARACTERS, LONG_TEXT * prompt.max_tokens),
    )


def _num_characters(messages: list[ChatMessage]) -> int:
    """Return the total number of characters in the texts of the messages."""
    return sum(
        len(message.content or "")
        if not isinstance(message.content, list)
        else sum(len(part.text or "") for part in message.content)
        for message in messages
    )
