"""The tokenizer, compared with that of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from baton_text.tokenizer import Tokenizer
from support.text.tokenizers import save, tokenizer

TEXTS = ["", "hello world", " 你好 🙂", "<s>hi</s> <tool>x", "a<|im_end|>b", "\n\n  tabs\t"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"pad_token": "<pad>", "extra_special_tokens": ["<|im_end|>"]},
        {
            "eos_token": {
                "__type": "AddedToken",
                "content": "</s>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
            }
        },
    ],
)
def test_encode_and_decode_equal_autotokenizer(tmp_path: Path, config: dict[str, object]) -> None:
    ours = Tokenizer.from_folder(save(tmp_path, **config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = [
        None if text is None else ours.token_id(text)
        for text in map(ours.special_tokens.get, ("bos_token", "eos_token"))
    ]
    assert ids == [theirs.bos_token_id, theirs.eos_token_id]
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                )


def test_missing_and_invalid_folders_raise_different_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_token_bytes_are_the_bytes_of_the_text() -> None:
    for kind in ("byte_level", "byte_fallback"):
        ids = tokenizer(kind).encode("h你🙂", add_special_tokens=False)
        assert (
            b"".join(map(tokenizer(kind).token_bytes, ids))
            .replace("▁".encode(), b" ")
            .strip()
            .decode()
            == "h你🙂"
        )
    assert tokenizer("byte_level").token_bytes(10**6) == b""


@given(
    text=st.text(max_size=200) | st.text(alphabet="hello wrd▁", max_size=200),
    kind=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_fewest_tokens_is_a_lower_bound_of_the_number_of_tokens(text: str, kind: str) -> None:
    assert tokenizer(kind).fewest_tokens(len(text)) <= len(
        tokenizer(kind).encode(text, add_special_tokens=False)
    )
    assert tokenizer(kind).fewest_tokens(10_000) > 100
