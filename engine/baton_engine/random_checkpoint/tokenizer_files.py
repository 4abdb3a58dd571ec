"""Writes the tokenizer of a checkpoint: byte-level BPE, three special tokens, a ChatML template."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(
    out: Path, vocab_size: int, max_length: int, *, marks_texts: bool = False
) -> dict[str, int]:
    """Train a byte-level BPE tokenizer on built-in sentences, and write its files to `out`.

    Args:
        out: folder of the checkpoint.
        vocab_size: maximum number of tokens in the vocabulary.
        max_length: value of `model_max_length` in tokenizer_config.json.
        marks_texts: add special tokens before and after texts, as BERT's tokenizer does.

    Returns:
        The vocabulary: token ids by token text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if marks_texts:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{TURN_START} $A {TURN_END}",
            pair=f"{TURN_START} $A {TURN_END} $B:1 {TURN_END}:1",
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in (TURN_START, TURN_END)],
        )
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer.get_vocab(with_added_tokens=True)


# The training corpus: random sentences of these words, and words chained from these parts. It is
# large enough for a few thousand merges.
_ADJECTIVES = """
quick quiet bright narrow early late gentle heavy simple careful distant silver wooden patient
steady open green
"""
_NOUNS = """
runner river window machine letter garden station market bridge question answer harbour teacher
engine story forest mountain kitchen morning winter number language city message
reader captain signal
"""
_VERBS = """
carries finds opens follows describes remembers crosses builds measures answers passes returns
reads writes keeps hands watches moves counts learns
"""
_ADVERBS = "slowly often again today never always together carefully almost nearly quickly"
_PHRASES = (
    "What is the capital of that country?",
    "Please explain how it works, step by step.",
    "Write a short story about the sea.",
    "You are a helpful assistant.",
    "The answer is 42, and the sum of 3 and 4 is 7.",
    "Once upon a time there was a small village near the river.",
    "def add(a, b):\n    return a + b\n",
    "I don't know; however, we can't stop here, and it's not the end.",
)
_PREFIXES = "re un over inter trans sub micro auto pre con dis en fore under out"
_STEMS = """
form port act struct press ject scrib mit duc vers tract spect gress lat pos ver fer tain cept grad
nect sist plic rupt loc mov quest cred serv tend vis voc flu jud
"""
_SUFFIXES = "ing ed er ion able ment ly ness ful al ive ity ance"


def _corpus() -> list[str]:
    adjectives, nouns, verbs, adverbs = (
        words.split() for words in (_ADJECTIVES, _NOUNS, _VERBS, _ADVERBS)
    )
    choose = random.Random(0).choice
    sentences = [
        f"The {choose(adjectives)} {choose(nouns)} {choose(verbs)} the {choose(nouns)} of a "
        f"{choose(adjectives)} {choose(nouns)} {choose(adverbs)}, "
        f"and it {choose(verbs)} every {choose(nouns)}."
        for _ in range(3000)
    ]
    derived = [
        " ".join(map("".join, itertools.product([prefix], _STEMS.split(), _SUFFIXES.split())))
        for prefix in _PREFIXES.split()
    ]
    return sentences + derived + list(_PHRASES) * 50
