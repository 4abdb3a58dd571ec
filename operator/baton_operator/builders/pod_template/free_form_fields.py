"""Check the fields `resources` and `template`, for which the CRD has no schema.

Only the parts that the operator uses are checked. The API server checks the rest when a pod is
created.
"""

from __future__ import annotations

import json
from typing import Any

from baton_operator.api.llmservice import is_deeper

#: Maximum depth of nested values. A pod has far fewer levels.
MAX_DEPTH = 100
_SHOWN = 80  # maximum length of a value in an error message, in characters


def must_be(what: str, path: str, got: Any) -> ValueError:
    """Return a ValueError with the message `<path> must be <what>, got <got>`.

    A `got` of more than _SHOWN characters is truncated.
    """
    shown = json.dumps(got)
    return ValueError(
        f"{path} must be {what}, got {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + ' ...'}"
    )


def check_depth(value: Any, path: str) -> None:
    """Raise ValueError if `value` is nested more than MAX_DEPTH levels deep."""
    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"{path} is nested more than {MAX_DEPTH} levels deep")


def check_resources(resources: Any, path: str) -> None:
    """Check `resources` of a container. None is valid.

    Raises:
        ValueError: a field is invalid. The message names the field.
    """
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
    """Return `values`, which are labels or annotations, without the null values.

    Raises:
        ValueError: a value is not a string. The message names the field.
    """
    if not isinstance(values, dict):
        raise must_be("an object", path, values)
    found = {name: value for name, value in values.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, str):
            raise must_be("a string", f"{path}.{name}", value)
    return found
