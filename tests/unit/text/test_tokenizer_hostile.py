"""A hostile tokenizer ends its loading with an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_engine.random_checkpoint import create_checkpoint
from baton_text import chat_template
from baton_text.generation_defaults import GenerationDefaults
from baton_text.tokenizer import Tokenizer, TokenizerError
from support.hostile.attack import Attack, fields, parametrize
from support.hostile.tokenizers import DEFAULTS_ATTACKS, TEXT_ATTACKS, TOKENIZER


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return create_checkpoint(tmp_path / "model", "qwen3", num_layers=1, vocab_size=300)


@parametrize(TEXT_ATTACKS)
def test_an_attack_is_refused_with_the_file_in_the_message(
    checkpoint: Path, attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.3)
    attack.apply(checkpoint)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is checked below)
        Tokenizer.from_folder(checkpoint)
    assert str(checkpoint / attack.file) in str(caught.value)
    assert attack.message in str(caught.value)


@parametrize(DEFAULTS_ATTACKS)
def test_an_attack_by_sampling_parameters_is_refused(checkpoint: Path, attack: Attack) -> None:
    attack.apply(checkpoint)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is checked below)
        GenerationDefaults.from_folder(checkpoint)
    assert str(checkpoint / attack.file) in str(caught.value)
    assert attack.message in str(caught.value)


def test_many_added_tokens_are_added_at_once(checkpoint: Path) -> None:
    """One call for each token would take minutes."""
    tokens = {str(i): {"content": f"<extra{i}>"} for i in range(300, 20_300)}
    fields(added_tokens_decoder=tokens)(checkpoint / "tokenizer_config.json")
    tokenizer = Tokenizer.from_folder(checkpoint)
    assert tokenizer.vocab_size >= 20_000
    assert len(tokenizer.encode("<extra300><extra20299>")) == 2


def failing_tokenizer(checkpoint: Path, **changes: Any) -> Tokenizer:
    fields(**changes)(checkpoint / TOKENIZER)
    return Tokenizer.from_folder(checkpoint)


def test_a_text_for_which_the_library_panics_raises_an_error(checkpoint: Path) -> None:
    """The regular expression needs too many steps for one text, and few for others."""
    pattern = {"type": "Split", "pattern": {"Regex": "(x+)+$"}, "behavior": "Isolated"}
    tokenizer = failing_tokenizer(checkpoint, pre_tokenizer=pattern | {"invert": False})
    assert tokenizer.encode("hello")
    with pytest.raises(TokenizerError, match="retry-limit"):
        tokenizer.encode("x" * 40 + "!")


def test_tokens_for_which_the_library_panics_raise_an_error(checkpoint: Path) -> None:
    strip = {"type": "Strip", "content": "!", "start": 0, "stop": 3}
    tokenizer = failing_tokenizer(checkpoint, decoder=strip)
    [token_id] = tokenizer.encode("!", add_special_tokens=False)
    for number in (1, 600):
        with pytest.raises(TokenizerError):
            tokenizer.decode([token_id] * number)


def test_the_normalizer_of_a_sound_tokenizer_is_accepted(checkpoint: Path) -> None:
    """Replacements of known tokenizers: a space becomes three bytes, quotes become one."""
    replacements = [(" ", "\u2581"), ("``", '"'), ("''", '"')]
    normalizers = [
        {"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in replacements
    ]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    content = json.loads((checkpoint / TOKENIZER).read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": [prepend, spaces, *normalizers]}
    (checkpoint / TOKENIZER).write_text(json.dumps(content))
    assert Tokenizer.from_folder(checkpoint).encode("hello world")
