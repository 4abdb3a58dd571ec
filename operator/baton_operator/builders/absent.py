"""The result of a builder whose service does not have the object."""

from __future__ import annotations

from typing import NamedTuple


class Absent(NamedTuple):
    """An object that must not exist. The operator deletes the object if the service owns it."""

    kind: str
    name: str
