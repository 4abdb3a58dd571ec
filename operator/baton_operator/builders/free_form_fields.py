"""Checks of what the schema takes as it is (`resources`, `template`), as far as the operator itself goes by it. What is wrong
besides the API server says of the pod."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 100
"""Of values within values; a pod has far fewer."""
_SHOWN = 80


def must_be(what: str, path: str, got: Any) -> ValueError:
    """`got` may be of any size; the message is not."""
    shown = json.dumps(got)
    return ValueError(
        f"{path} must be {what}, got {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + ' ...'}"
    )


def check_depth(value: Any, path: str) -> None:
    """Raises ValueError: `value` could not be copied."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [below for each in level if isinstance(each, dict | list) for below in _below(each)]
        if not level:
            return
    raise ValueError(f"{path} is nested more than {MAX_DEPTH} levels deep")


def check_resources(resources: Any, path: str) -> None:
    """None: there are none. Raises ValueError naming the field."""
    if resources is None:
        return
    if not isinstance(resources, dict):
        raise must_be("an object", path, resources)
    check_depth(resources, path)
    for kind in ("requests", "limits"):
        amounts = resources.get(kind)
        if amounts is None:
            continue
        if not isinstance(amounts, dict):
            raise must_be("an object", f"{path}.{kind}", amounts)
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not isinstance(amount, str | int | float):
                raise must_be("a quantity", f"{path}.{kind}.{name}", amount)


def strings(values: Any, path: str) -> dict[str, str]:
    """Labels or annotations; null removes. Raises ValueError naming the field."""
    if not isinstance(values, dict):
        raise must_be("an object", path, values)
    found = {name: value for name, value in values.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, str):
            raise must_be("a string", f"{path}.{name}", value)
    return found


def _below(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
