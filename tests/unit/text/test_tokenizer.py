"""Tokenizer, chat template, detokenizer and stop strings, compared with transformers."""

from __future__ import annotations

import functools
import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from baton_text.chat_template import ChatTemplate, ChatTemplateError
from baton_text.detokenizer import IncrementalDetokenizer
from baton_text.requests.generation_request import MAX_STOP_CHARACTERS
from baton_text.stop_strings import StopScanner
from baton_text.tokenizer import Tokenizer

CORPUS = [
    "hello world, the quick brown fox says hello to the world",
    "你好，世界 🙂 naïve café",
] * 8
CHATML = """\
{{ bos_token }}{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- if loop.index0 > 8 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think></think>' }}
    {%- endif %}
{% endif %}
{{ messages | tojson }}"""


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
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                )


MESSAGES = [{"role": "system", "content": " be <b> "}, {"role": "user", "content": "你好"}]


@pytest.mark.parametrize("in_file", [True, False])
def test_chat_templates_render_as_in_transformers(tmp_path: Path, in_file: bool) -> None:
    if in_file:
        save(tmp_path, chat_template="not this one")
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    else:
        save(tmp_path, chat_template=CHATML)
    ours = Tokenizer.from_folder(tmp_path).chat_template
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for generation in (True, False):
        for extra in ({}, {"enable_thinking": False}):
            expected = theirs.apply_chat_template(
                MESSAGES, tokenize=False, add_generation_prompt=generation, **extra
            )
            assert ours.render(MESSAGES, add_generation_prompt=generation, **extra) == expected


def test_a_template_may_raise_an_exception_but_not_leave_the_sandbox() -> None:
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        refusing.render(MESSAGES)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.append(1) }}", {}).render(MESSAGES)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render(MESSAGES)
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("\n{% if %}", {})
    assert len(ChatTemplate("{{ strftime_now('%Y') }}", {}).render([])) == 4
    assert ChatTemplate("{% generation %}a{% endgeneration %}", {}).render([]) == "a"


def test_developers_are_systems_for_templates_without_that_role() -> None:
    roles = "{% for message in messages %}{{ message.role }} {% endfor %}"
    messages = [{"role": role, "content": "hi"} for role in ("developer", "user")]
    assert ChatTemplate(roles, {}).render(messages) == "system user "
    assert ChatTemplate(f"{roles}{{# developer #}}", {}).render(messages) == "developer user "


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


def pieces_of(kind: str, ids: list[int], cuts: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer(kind), skip_special_tokens=skip)
    bounds = sorted({0, *(cut % (len(ids) + 1) for cut in cuts), len(ids)})
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 399), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=40),
    skip=st.booleans(),
)
def test_pieces_of_any_tokens_add_up_to_the_whole_text(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Random tokens of a byte-level vocabulary are mostly invalid UTF-8."""
    whole = tokenizer("byte_level").decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of("byte_level", ids, cuts, skip=skip)) == whole
    assert "".join(pieces_of("byte_level", ids, list(range(len(ids))), skip=skip)) == whole


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, 274), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=30)
)
@example(ids=[3, 270, 131], cuts=[2])  # an id without a token inside a run of bytes
def test_pieces_of_byte_fallback_tokens_add_up_to_the_whole_text(
    ids: list[int], cuts: list[int]
) -> None:
    whole = tokenizer("byte_fallback").decode(ids)
    assert "".join(pieces_of("byte_fallback", ids, cuts)) == whole


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30), kind=st.sampled_from(["byte_level", "byte_fallback"]))
def test_no_piece_ends_inside_a_character(text: str, kind: str) -> None:
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    whole = tokenizer(kind).decode(ids)
    pieces = pieces_of(kind, ids, list(range(len(ids))))
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


def test_the_window_stays_small_for_invalid_bytes() -> None:
    kind = tokenizer("byte_level")
    broken = next(i for i in range(kind.vocab_size) if kind.token_bytes(i) == b"\x80")
    detokenizer = IncrementalDetokenizer(kind)
    text = "".join(detokenizer.push([broken]) for _ in range(500)) + detokenizer.flush()
    assert text == "\ufffd" * 500
    assert len(detokenizer._window) < 40


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the text up to the stop string that ends first, and this stop string.

    Of stop strings that end together the longest counts.
    """
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=30),
    include=st.booleans(),
)
def test_stop_strings_are_found_wherever_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    scanner = StopScanner(stops, include_stop=include)
    bounds = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    sent = ""
    expected, stop = reference(text, stops, include)
    for start, end in itertools.pairwise(bounds):
        sent += scanner.push(text[start:end])
        assert expected.startswith(sent), "a part of the stop string was sent"
    sent += scanner.flush()
    assert (sent, scanner.matched) == (expected, stop)


def test_long_stop_strings_cost_little_for_each_token() -> None:
    """Tokens of 128 characters exist. With longer stop strings, each took up to 0.85 ms."""
    spaces = " " * 128
    for stops in (
        [f"{chr(97 + number)}{' ' * 15}" for number in range(32)],
        [" " * 50 + letter + " " * 75 for letter in "abcd"],
        [" " * 250 + "b" + " " * 250],
        [" " * 380 + "b", *(f"{chr(97 + number)}   " for number in range(31))],
    ):
        assert sum(map(len, stops)) <= MAX_STOP_CHARACTERS
        scanner = StopScanner(stops)
        scanner.push(spaces * 4)
        started = time.thread_time()
        for _ in range(300):
            assert scanner.push(spaces) == spaces
        assert time.thread_time() - started < 0.6  # 0.013 s
        assert scanner.matched is None


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["</end>"])
    assert scanner.push("text </e") == "text "
    assert scanner.push("x") == "</ex"
    assert scanner.push("more</end") == "more"
    assert scanner.push(">tail") == ""
    assert (scanner.matched, scanner.push("x"), scanner.flush()) == ("</end>", "", "")


@given(
    text=st.text(max_size=200) | st.text(alphabet="hello wrd▁", max_size=200),
    kind=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_fewest_tokens_is_a_lower_bound_of_the_number_of_tokens(text: str, kind: str) -> None:
    assert tokenizer(kind).fewest_tokens(len(text)) <= len(
        tokenizer(kind).encode(text, add_special_tokens=False)
    )
    assert tokenizer(kind).fewest_tokens(10_000) > 100
