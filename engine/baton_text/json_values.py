"""Counts the values of a JSON text without parsing it, because parsed values take memory."""

from __future__ import annotations

import re

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def count_values(text: bytes, max_values: int, max_containers: int) -> tuple[int, int]:
    """Return the number of values, and the number of arrays and objects, in the JSON `text`.

    An entry of an object counts as two values. The first count is fast, but also counts punctuation
    inside strings. If this count exceeds a limit, the result is a second count without strings.

    Args:
        text: a JSON text, which may be invalid.
        max_values: the count stops above this number of values.
        max_containers: the count stops above this number of arrays and objects.
    """
    values, containers = count_punctuation(text, 0, len(text))
    if values <= max_values and containers <= max_containers:
        return values, containers
    # The first count includes punctuation inside strings, so count again without strings.
    values = containers = start = 0
    while values <= max_values and containers <= max_containers:
        quote = text.find(b'"', start)
        found = count_punctuation(text, start, len(text) if quote < 0 else quote)
        values, containers = values + found[0], containers + found[1]
        string = None if quote < 0 else STRING.match(text, quote)
        if string is None or (start and not found[0]):  # the end, or invalid JSON
            break
        start = string.end()
    return values, containers


def count_punctuation(text: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the number of JSON values, and of arrays and objects, in `text[start:end]`.

    Brackets, commas and colons are counted, including those in strings.
    """
    containers = text.count(b"[", start, end) + text.count(b"{", start, end)
    return containers + text.count(b",", start, end) + text.count(b":", start, end), containers
