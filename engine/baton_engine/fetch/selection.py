"""Which files of a model are taken, and under which names they may lie in its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

from baton_engine.fetch.fetch_errors import invalid

Only = Literal["all", "tokenizer"]

WEIGHTS_SUFFIX = ".safetensors"
CONFIG_FILE = "config.json"
TEXT_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
"""What a gateway reads, at the top of the folder."""


def select(names: Iterable[str], only: Only) -> list[str]:
    """The names to take, sorted. An allow-list: weights in safetensors, JSON, and the tokenizer's files at the top of the folder;
    what holds code, pickles among them, is left behind.

    Raises:
        FetchError: ModelInvalid, for a name that would leave the folder, or if there is nothing to serve.
    """
    taken = []
    for name in sorted(set(names)):
        check_name(name)
        at_top = "/" not in name
        text = at_top and name in TEXT_FILES
        engine = at_top and name.endswith((WEIGHTS_SUFFIX, ".json"))
        if text or (engine and only == "all"):
            taken.append(name)
    if CONFIG_FILE not in taken:
        raise invalid(f"there is no {CONFIG_FILE} among its files")
    if only == "all" and not any(name.endswith(WEIGHTS_SUFFIX) for name in taken):
        raise invalid(f"none of its files ends in {WEIGHTS_SUFFIX}; pickled weights are not loaded")
    return taken


def check_name(name: str) -> None:
    """Raises FetchError if `name` is no plain relative path."""
    parts = name.split("/")
    hostile = (
        not name
        or "\\" in name
        or any(part in ("", ".", "..") for part in parts)
        or not name.isprintable()
    )
    if hostile or PurePosixPath(name).is_absolute() or len(name) > 255:
        raise invalid(f"it names a file {name!r}, which would not stay in the model's folder")
