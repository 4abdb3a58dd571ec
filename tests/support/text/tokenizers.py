"""Byte-level and byte-fallback tokenizers in a folder, and text to encode.

For the tests of the tokenizer, the detokenizer and the chat template.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from baton_text.tokenizer import Tokenizer

CORPUS = [
    "hello world, the quick brown fox says hello to the world",
    "你好，世界 🙂 naïve café",
] * 8


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


def byte_fallback() -> Backend:
    """Return a backend like Llama 2's: spaces are ▁, unknown characters become <0xXX> tokens."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"helowrd",
        "▁hello",
        "▁world",
    ]
    merges = [("▁", "h")]
    vocab = {piece: index for index, piece in enumerate([*pieces, "▁h"])}
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(
        {"byte_level": byte_level, "byte_fallback": byte_fallback}[kind](), dict(CONFIG)
    )


def save(folder: Path, **config: object) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | config))
    return folder
