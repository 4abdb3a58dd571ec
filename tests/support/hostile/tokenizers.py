"""Attacks by the files of a tokenizer, and by generation_config.json on the gateway.

For the tests of the tokenizer, the gateway and LLM.
"""

from __future__ import annotations

from typing import Any

from support.hostile.attack import Attack, content, fields, file_attacks, nested, sparse
from support.hostile.configs import GENERATION
from support.hostile.templates import LOOPS

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
UNUSABLE = "cannot be used"
LIBRARY = "is not a tokenizer of the `tokenizers` library"

_MODEL: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, " ": 2}, "merges": []}
_SPECIAL_TOKEN = {"SpecialToken": {"id": "X", "type_id": 0}}
_DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def _backend(name: str, message: str = LIBRARY, **changes: Any) -> Attack:
    """Return an attack by a tokenizer.json that the library parses, unless it panics."""
    return Attack(f"backend-{name}", TOKENIZER, fields(model=_MODEL, **changes), message)


def _model(name: str, message: str = LIBRARY, **changes: Any) -> Attack:
    return Attack(f"model-{name}", TOKENIZER, fields(model=_MODEL | changes), message)


def _replace(pattern: dict[str, str], text: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": text}


BACKEND_ATTACKS = [
    *file_attacks(TOKENIZER),
    Attack("tokenizer-large", TOKENIZER, sparse, "1073741824 bytes"),
    Attack("tokenizer-deep", TOKENIZER, nested('{"a":', "}"), LIBRARY),
    Attack("tokenizer-empty", TOKENIZER, content("{}"), LIBRARY),
    Attack("tokenizer-not-utf8", TOKENIZER, content(b'{"a": "\xff"}'), LIBRARY),
    _model("merge-unknown", merges=["a x"]),
    _model("id-negative", vocab={"a": -1}),
    _model("id-huge", "largest token id", vocab={"a": 2**32 - 1}),
    _model("unknown-missing", unk_token="<unk>", vocab={"q": 0}),
    _model("type", type="Nothing"),
    # These three make the library panic.
    _backend("charsmap", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    _backend(
        "charsmap-index", normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}
    ),
    _backend(
        "post-processor",
        post_processor={
            "type": "TemplateProcessing",
            "single": [_SPECIAL_TOKEN, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
    ),
    _backend("strip", decoder={"type": "Strip", "content": "a", "start": 2**60, "stop": 2**60}),
    _backend(
        "normalizer-doubles",
        "can lengthen a text",
        normalizer={"type": "Sequence", "normalizers": [_DOUBLE] * 40},
    ),
    _backend(
        "normalizer-long", "can lengthen a text", normalizer=_replace({"String": "a"}, "b" * 10**6)
    ),
    _backend(
        "normalizer-regex", "can lengthen a text", normalizer=_replace({"Regex": "z*"}, "b" * 99)
    ),
    _backend(
        "normalizer-prepends",
        "can lengthen a text",
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "x" * 10**4}] * 10,
        },
    ),
    _backend(
        "decoder-doubles",
        "can lengthen a text",
        decoder={"type": "Sequence", "decoders": [_DOUBLE] * 40},
    ),
]


def _config(name: str, message: str = UNUSABLE, **changes: Any) -> Attack:
    return Attack(f"config-{name}", CONFIG, fields(**changes), message)


TEXT_CONFIG_ATTACKS = [
    *file_attacks(CONFIG),
    Attack("config-large", CONFIG, sparse, "1073741824 bytes"),
    Attack("config-deep", CONFIG, nested('{"a":', "}"), "nested too deeply"),
    Attack("config-list", CONFIG, content("[]"), "must hold a JSON object"),
    Attack("config-not-utf8", CONFIG, content(b'{"a": "\xff"}'), "cannot be read"),
    _config("added-list", added_tokens_decoder=[1]),
    _config("added-key", added_tokens_decoder={"x": {"content": "a"}}),
    _config("added-token", added_tokens_decoder={"1": "a"}),
    _config("added-content", added_tokens_decoder={"1": {"content": 1}}),
    _config("added-empty", added_tokens_decoder={"1": {}}),
    _config("extra-number", extra_special_tokens=1),
    _config("template-number", chat_template=1),
    _config("template-names", chat_template=[1]),
    _config("template-empty", chat_template=[{"name": "default"}]),
    _config("template-syntax", "line 1", chat_template="{% if %}"),
    _config("template-loops", "CPU time", chat_template="{{ 9 ** 99999999 }}" + LOOPS),
]

TEMPLATE_FILE_ATTACKS = [
    *file_attacks(TEMPLATE),
    Attack("template-large", TEMPLATE, sparse, "1073741824 bytes"),
    Attack("template-not-utf8", TEMPLATE, content(b"\xff"), UNUSABLE),
    Attack("template-syntax", TEMPLATE, content("{% if %}"), UNUSABLE),
]

DEFAULTS_ATTACKS = [
    *file_attacks(GENERATION),
    Attack("defaults-large", GENERATION, sparse, "1073741824 bytes"),
    Attack("defaults-deep", GENERATION, nested('{"a":', "}"), UNUSABLE),
    Attack("defaults-not-utf8", GENERATION, content(b'{"top_p": "\xff"}'), UNUSABLE),
    Attack("defaults-nan", GENERATION, content('{"temperature": NaN}'), UNUSABLE),
    Attack("defaults-huge", GENERATION, fields(top_k=10**30), UNUSABLE),
    Attack("defaults-type", GENERATION, fields(temperature="warm"), UNUSABLE),
    Attack("defaults-negative", GENERATION, fields(max_new_tokens=-1), UNUSABLE),
]

TEXT_ATTACKS = [*BACKEND_ATTACKS, *TEXT_CONFIG_ATTACKS, *TEMPLATE_FILE_ATTACKS]
