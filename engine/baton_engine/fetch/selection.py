"""Selects the files of a model to download, and checks their names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

from baton_engine.fetch.fetch_errors import FetchError

Only = Literal["all", "tokenizer"]

WEIGHTS_SUFFIX = ".safetensors"
CONFIG_FILE = "config.json"
#: Settings of the pooling, written by `sentence-transformers`. Engines read no other file in a
#: subfolder of the model.
POOLING_FOLDER = "1_Pooling"
POOLING_FILE = f"{POOLING_FOLDER}/config.json"
MAX_FILES = 4096
#: Files that a gateway reads, at the top of the folder.
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


def select(names: Iterable[str], only: Only) -> list[str]:
    """Return the names of the files to download, sorted.

    Safetensors, JSON and tokenizer files at the top of the model's folder are selected, and also
    POOLING_FILE. Hidden files and files that can contain code, such as pickles, are never selected.

    Args:
        names: names of all files of the model.
        only: "tokenizer" selects only the files that a gateway reads.

    Raises:
        FetchError: a name is unsafe, more than MAX_FILES files are selected, or config.json or the
            weights are missing (ModelInvalid).
    """
    taken = []
    for name in sorted(set(names)):
        check_name(name)
        at_top = not name.startswith(".") and "/" not in name
        text = at_top and name in TEXT_FILES
        engine = name == POOLING_FILE or (at_top and name.endswith((WEIGHTS_SUFFIX, ".json")))
        if text or (engine and only == "all"):
            taken.append(name)
    if len(taken) > MAX_FILES:
        raise FetchError(
            "ModelInvalid", f"the model has {len(taken)} files; at most {MAX_FILES} are downloaded"
        )
    if CONFIG_FILE not in taken:
        raise FetchError("ModelInvalid", f"the model has no {CONFIG_FILE}")
    if only == "all" and not any(name.endswith(WEIGHTS_SUFFIX) for name in taken):
        raise FetchError(
            "ModelInvalid",
            f"the model has no {WEIGHTS_SUFFIX} file; pickled weights are not loaded",
        )
    return taken


def check_name(name: str) -> None:
    """Raise FetchError (ModelInvalid) unless `name` is a safe path in the model's folder.

    A safe path is relative and printable, has no backslash and no part `.` or `..`, and has at most
    255 characters.
    """
    parts = name.split("/")
    hostile = (
        not name
        or "\\" in name
        or any(part in ("", ".", "..") for part in parts)
        or not name.isprintable()
    )
    if hostile or PurePosixPath(name).is_absolute() or len(name) > 255:
        raise FetchError(
            "ModelInvalid", f"the file name {name!r} may lead out of the model's folder"
        )
