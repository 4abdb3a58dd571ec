"""The tokenizer of a Hugging Face checkpoint, based on the `tokenizers` library.

The token ids are the same as those of `transformers.AutoTokenizer`. Several threads may encode and
decode at the same time. Long texts are processed without the GIL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken
from tokenizers import Tokenizer as _Backend

from baton_protocol.checkpoint_files import (
    MAX_TOKEN_ID,
    MAX_TOKENIZER_BYTES,
    read_file,
    read_json,
)
from baton_text.chat_template import ChatTemplate

FILE, CONFIG_FILE, TEMPLATE_FILE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
#: Limit on the factor by which the replacements of a normalizer or a decoder lengthen a text.
#: Known tokenizers replace a space with three bytes.
MAX_GROWTH = 64

#: For more tokens than this, `decode` calls the library's `decode_batch`. That call releases the
#: GIL, and takes a little longer.
_LONG_DECODE = 512
#: Assumed upper bound of the factor by which a normalizer shortens a text in bytes.
_MOST_SHORTENING = 4
_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_Result = TypeVar("_Result")


class TokenizerError(ValueError):
    """Raised when the `tokenizers` library fails because of tokenizer.json or the text."""


class Tokenizer:
    """Converts text to token ids and back.

    Args:
        backend: a tokenizer of the `tokenizers` library. The constructor switches its truncation
            and padding off.
        config: content of tokenizer_config.json.
        chat_template: Jinja source. None: the template in `config`, if `config` has one.

    Raises:
        ValueError: `config` or the chat template is invalid. The message names the invalid part.
    """

    def __init__(
        self, backend: _Backend, config: dict[str, Any], chat_template: str | None = None
    ) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        #: Text of the named special tokens ("eos_token", ...), which the chat template can use.
        self.special_tokens = _named_special_tokens(config)
        self._token_texts: dict[int, str] = {}
        self._register_special_tokens(config)
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        source = chat_template if chat_template is not None else _template_of(config)
        #: None: the checkpoint has no chat template, so chat requests cannot be served.
        self.chat_template = None if source is None else ChatTemplate(source, self.special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder, which is untrusted.

        Raises:
            FileNotFoundError: the folder or its tokenizer.json is missing.
            ValueError: a file cannot be used. The message names the file.
        """
        path = folder / FILE
        try:
            content = read_file(folder, FILE, MAX_TOKENIZER_BYTES)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} does not exist: the model path must be a checkpoint with {FILE}"
            ) from None
        try:
            backend = _guarded(lambda: _Backend.from_buffer(content))
            backend.no_truncation()
            backend.no_padding()
            _check_backend(backend)
        except ValueError as error:
            raise ValueError(
                f"{path} is not a tokenizer of the `tokenizers` library: {error}"
            ) from error
        config = read_json(folder, CONFIG_FILE) if _exists(folder, CONFIG_FILE) else {}
        try:
            template_file, template = CONFIG_FILE, _template_of(config)
            tokenizer = cls(backend, config | {"chat_template": None})
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"{folder / CONFIG_FILE} cannot be used: {error!r}") from error
        if _exists(folder, TEMPLATE_FILE):
            template_file = TEMPLATE_FILE
            content = read_file(folder, TEMPLATE_FILE)
        try:
            if template_file == TEMPLATE_FILE:
                template = content.decode()
            if template is not None:
                tokenizer.chat_template = ChatTemplate(template, tokenizer.special_tokens)
        except ValueError as error:
            raise ValueError(f"{folder / template_file} cannot be used: {error}") from error
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, including added tokens."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text. None: no token has it."""
        return self._backend.token_to_id(text)

    def special_token_id(self, text: str) -> int | None:
        """Return the id of the special token with this text. None: no special token has it.

        An added token in angle brackets, such as <tool_call> of Qwen3, counts as special even if
        tokenizer.json does not mark it as special. A grammar of llguidance can allow such a
        token only by its id.
        """
        token_id = self._backend.token_to_id(text)
        is_special = token_id in self.special_token_ids or (
            token_id in self._added_ids and text.startswith("<") and text.endswith(">")
        )
        return token_id if is_special else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any Unicode text.
            add_special_tokens: add the special tokens that tokenizer.json's post-processor defines.

        Raises:
            ValueError: the text cannot be encoded as UTF-8.
            TokenizerError: the library fails.
        """
        _check_unicode(text)
        # The batch call lets other threads run and keeps no offsets.
        [encoding] = _guarded(
            lambda: self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        )
        return list(encoding.ids)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, including special tokens.

        Returns:
            The token ids, and the position of the first token with type id 1, where the second text
            begins. If no token has type id 1, the position is the number of token ids.

        Raises:
            ValueError, TokenizerError: as for `encode`.
        """
        for text in (first, second):
            _check_unicode(text)
        [encoding] = _guarded(
            lambda: self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        )
        types = list(encoding.type_ids)
        return list(encoding.ids), types.index(1) if 1 in types else len(types)

    def fewest_tokens(self, num_characters: int) -> int:
        """Return a lower bound on the number of tokens of a text with this many characters."""
        shortening = 1 if self._backend.normalizer is None else _MOST_SHORTENING
        return num_characters // (self._longest_token_bytes * shortening)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Invalid UTF-8 becomes U+FFFD. Ids outside the vocabulary add no text.

        Raises:
            TokenizerError: the library fails.
        """
        ids = list(token_ids)
        if len(ids) > _LONG_DECODE:
            [text] = _guarded(
                lambda: self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            )
            return str(text)
        return str(
            _guarded(lambda: self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        )

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, which may be a special token."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def has_token(self, token_id: int) -> bool:
        """Return whether the id is in the vocabulary.

        A model may have logits for more ids than the vocabulary has tokens.
        """
        return self._backend.id_to_token(token_id) is not None

    def is_byte_fallback(self, token_id: int) -> bool:
        """Return whether the token stands for a single byte, like <0xE4>.

        The tokenizer decodes consecutive tokens of this kind together.
        """
        return token_id in self._byte_fallback_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be an incomplete UTF-8 sequence."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._byte_fallback_ids:
            return bytes([int(token[3:5], 16)])
        if (
            self._is_byte_level
            and token_id not in self._added_ids
            and all(char in _BYTE_OF_CHAR for char in token)
        ):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return self.decode([token_id], skip_special_tokens=False).encode()

    @cached_property
    def _longest_token_bytes(self) -> int:
        # A token as the vocabulary writes it is at least as long as the text that it stands for.
        return max(len(token.encode()) for token in self._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        return any(part.get("type") == "ByteLevel" for part in parts)

    @cached_property
    def _byte_fallback_ids(self) -> frozenset[int]:
        if self._is_byte_level:
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)

    def _register_special_tokens(self, config: dict[str, Any]) -> None:
        """Add the tokens that tokenizer_config.json declares and tokenizer.json does not."""
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        # One call for all tokens: each call compiles the patterns of all added tokens.
        tokens = []
        declared = config.get("added_tokens_decoder") or {}
        for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
            if token["content"] not in known:
                flags = {
                    key: bool(token.get(key))
                    for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
                }
                tokens.append(AddedToken(token["content"], **flags))
                known.add(token["content"])
        _guarded(lambda: self._backend.add_tokens(tokens))
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        extra_texts = [
            _token_text(token) for token in (extra.values() if isinstance(extra, dict) else extra)
        ]
        special = []
        for text in [*self.special_tokens.values(), *extra_texts]:
            if text is not None and text not in known:
                special.append(AddedToken(text, special=True, normalized=False))
                known.add(text)
        _guarded(lambda: self._backend.add_special_tokens(special))


def _check_unicode(text: str) -> None:
    """Raise ValueError if a text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is invalid Unicode: character {error.start} is half of a surrogate pair"
        ) from error


def _exists(folder: Path, name: str) -> bool:
    """Return whether the folder has a file of this name, which may be a broken link."""
    return os.path.lexists(folder / name)


def _guarded(call: Callable[[], _Result]) -> _Result:
    """Return the result of a call of the `tokenizers` library.

    Raises:
        TokenizerError: the library raised Exception, or its Rust code panicked, which raises a
            BaseException.
    """
    try:
        return call()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise TokenizerError(str(error)) from error


def _check_backend(backend: _Backend) -> None:
    """Check that a tokenizer is within limits, and can encode and decode a short text.

    Raises:
        ValueError: an id is too large, the normalizer or decoder can lengthen a text too much, or
            the short text cannot be encoded or decoded.
    """
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > MAX_TOKEN_ID:
        raise ValueError(f"its largest token id is {largest}; at most {MAX_TOKEN_ID} is supported")
    for name in ("normalizer", "decoder"):
        part = getattr(backend, name)
        growth = 1.0 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} can lengthen a text {growth:g} times; at most {MAX_GROWTH} times is "
                "supported"
            )
    [encoding] = _guarded(lambda: backend.encode_batch_fast(["a b"], add_special_tokens=True))
    _guarded(lambda: backend.decode(encoding.ids, skip_special_tokens=False))


def _growth(part: object) -> float:
    """Return by what factor the replacements in a normalizer or decoder can lengthen a text."""
    growth = 1.0
    for step in _steps(part):
        if step.get("type") == "Replace":
            # A regular expression may match the empty text. A match then only inserts the content.
            pattern = step["pattern"].get("String") or ""
            size, replaced = len(step["content"].encode()), len(pattern.encode())
            growth *= max(1.0, size / replaced if replaced else 1 + size)
        elif step.get("type") == "Prepend":
            growth *= 1 + len(step["prepend"].encode()) / MAX_GROWTH
    return growth


def _steps(part: object) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or decoder: all JSON objects in `part`, at any depth."""
    if isinstance(part, dict):
        yield part
    if isinstance(part, dict | list):
        for value in part.values() if isinstance(part, dict) else part:
            yield from _steps(value)


def _token_text(token: object) -> str | None:
    """Return the text of a token in tokenizer_config.json, or None if there is no text.

    The token is a string or a serialized AddedToken.
    """
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(config.get(name)) for name in _NAMED_SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _template_of(config: dict[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates: the one for plain chat
        template = next(
            (item["template"] for item in template if item.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise ValueError("chat_template must be a text, or a list of named texts")
    return template


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of GPT-2's byte-level alphabet stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    chars = {chr(byte): byte for byte in printable}
    unprintable = [byte for byte in range(256) if byte not in printable]
    chars.update({chr(256 + index): byte for index, byte in enumerate(unprintable)})
    return chars


_BYTE_OF_CHAR = _byte_level_alphabet()
