"""The `#:` comments of a struct's fields, which are the descriptions in schemas and references."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec


def field_comments(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the `#:` comments of the fields of a struct and of its bases, by field name.

    A comment stands before the field, or on the same line after it.
    """
    base: Any = struct.__base__
    comments = {} if base in (object, msgspec.Struct) else field_comments(base)
    lines: list[str] = []
    for line in inspect.getsource(struct).splitlines():
        code, mark, comment = line.partition("#:")
        lines += [comment.strip()] if mark else []
        if field := re.match(r" {4}(\w+): ", code):
            if lines:
                comments[field[1]] = " ".join(lines)
            lines = []
    return comments
