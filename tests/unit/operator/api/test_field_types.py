"""Types of spec fields."""

from __future__ import annotations

import pytest

from baton_operator.api.field_types import quantity_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("2Ki", 2048), ("3M", 3_000_000), ("1Ti", 2**40)]
)
def test_quantities_are_converted_to_bytes(text: str, size: int) -> None:
    assert quantity_bytes(text) == size
