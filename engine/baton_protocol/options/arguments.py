"""Types of command-line arguments for argparse.

For an invalid value, argparse prints a line that names the flag, and exits with status 2.
"""

from __future__ import annotations

import argparse
import math

MAX_PORT = 65535


def port(text: str) -> int:
    """Parse a TCP port. 0 means any free port."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be in [0, {MAX_PORT}], got {text}")
    return value


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number that is 0 or more."""
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, got {text}")
    return value


def count(text: str) -> int:
    """Parse an integer that is 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer, 1 or more, got {text}")
    return int(text)


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
