"""Renders conversations with the chat template, and trains the tokenizer of the demo model.

Baton's own renderer is used, so that the texts of the training equal those of the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from baton_text.chat_messages import ChatMessage, template_messages
from baton_text.chat_template import ChatTemplate
from demo_model.sampling import Conversation

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
#: A word, a digit, a space or a sign is never part of a token with another one. A value therefore
#: has the same tokens in a question, in a call and in an answer, and can be copied.
_PIECES = r"\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]"


class Renderer:
    """Renders conversations to texts."""

    def __init__(self) -> None:
        self._template = ChatTemplate(TEMPLATE_FILE.read_text(), {})

    def render(self, conversation: Conversation) -> str:
        """Return the text of a whole conversation."""
        messages = msgspec.convert(conversation.messages, list[ChatMessage])
        return self._template.render(
            template_messages(messages),
            add_generation_prompt=False,
            tools=conversation.tools or None,
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL_START, CALL_END)])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    """Write the files of the tokenizer and the chat template to `out`."""
    tokenizer.save(str(out / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE_FILE.read_text())


def encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[bool]]:
    """Return the token ids of a rendered conversation, and which of them the assistant writes.

    The assistant writes the tokens between the line break after its role and the end of its turn,
    which it writes as well.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    start, end = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
    [line_break] = tokenizer.encode("\n", add_special_tokens=False).ids
    written = [False] * len(ids)
    index = 0
    while index < len(ids):
        if ids[index] == start:
            body = ids.index(line_break, index) + 1
            stop = ids.index(end, body) + 1
            if tokenizer.decode(ids[index + 1 : body - 1]) == "assistant":
                written[body:stop] = [True] * (stop - body)
            index = stop
        else:
            index += 1
    return ids, written
