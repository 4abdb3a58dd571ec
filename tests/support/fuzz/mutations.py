"""Random changes of values, which JSON or msgpack can encode, and of bytes. For all fuzz tests."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

#: A string that `encode_json` replaces by JSON that no encoder writes.
DEEP, HUGE_NUMBER, SURROGATE, RAW_BYTES = "<deep>", "<huge>", "<surrogate>", "<raw>"

SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 127, 128, 255, 256, 65535, 65536),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1),
    *(0.0, -0.0, 0.5, 1.0, -1.5, 1e-300, 1e300, 5e-324),
    *("", " ", "a", "0", "m", "\x00", "\n", "%s%n", "../..", "\u202e", "\U0001f600", "é" * 40),
    *("x" * 300, "hello world " * 20),
    *(DEEP, HUGE_NUMBER, SURROGATE, RAW_BYTES),
]
_JSON_TEXT = {
    DEEP: b"[" * 3000 + b"]" * 3000,
    HUGE_NUMBER: b"1" + b"0" * 400,
    SURROGATE: b'"\\ud800"',
    RAW_BYTES: b'"\xff\xc3\x28"',
}
_PATTERNS = (
    b"\x00",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x80",
    b"\r\n",
    b"\n",
    b'"',
    b"\\",
    b"{[",
    b"%00",
)


def mutate_value(value: Any, rng: random.Random, *, rounds: int = 1) -> Any:
    """Return a copy of `value` in which random parts are replaced, removed, doubled or moved."""
    value = copy.deepcopy(value)
    for _ in range(rounds):
        value = _mutate_once(value, rng)
    return value


def _mutate_once(value: Any, rng: random.Random) -> Any:
    containers = [each for each in _walk(value) if isinstance(each, dict | list) and each]
    if not containers:
        return random_value(rng)
    chosen = rng.choice(containers)
    keys: list[Any] = list(chosen) if isinstance(chosen, dict) else list(range(len(chosen)))
    key = rng.choice(keys)
    action = rng.randrange(8)
    if action < 4:
        chosen[key] = random_value(rng)
    elif action == 4:
        del chosen[key]
    elif action == 5:
        chosen[key] = [copy.deepcopy(chosen[key])] * rng.choice((1, 2, 3, 50))
    elif action == 6:
        chosen[key], chosen[keys[0]] = chosen[keys[0]], chosen[key]
    elif isinstance(chosen, dict):
        chosen[rng.choice(("x", "", "__class__", "priority", "model", "n" * 200))] = random_value(
            rng
        )
    else:
        chosen.extend(random_value(rng) for _ in range(rng.choice((1, 5, 100))))
    return value


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(20)
    if kind < 17 or depth > 3:
        return rng.choice(SCALARS)
    size = rng.choice((0, 1, 2, 9))
    if kind < 19:
        return [random_value(rng, depth + 1) for _ in range(size)]
    return {str(rng.choice(SCALARS)): random_value(rng, depth + 1) for _ in range(size)}


def _walk(value: Any) -> list[Any]:
    found = [value]
    for each in found:
        if isinstance(each, dict):
            found.extend(each.values())
        elif isinstance(each, list):
            found.extend(each)
    return found


def encode_json(value: Any) -> bytes:
    """Return `value` as JSON. The special strings become deep, huge or invalid JSON."""
    text = json.dumps(value).encode()
    for name, replacement in _JSON_TEXT.items():
        text = text.replace(f'"{name}"'.encode(), replacement)
    return text


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return a copy of `data` with a few bytes changed, removed, inserted, doubled or cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed) + 1)
        action = rng.randrange(6)
        if action == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif action == 1 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif action == 2:
            changed[at:at] = rng.choice(_PATTERNS) * rng.choice((1, 1, 1, 8, 300))
        elif action == 3:
            del changed[at : at + rng.choice((1, 2, 4, 30))]
        elif action == 4:
            changed[at:at] = changed[at : at + rng.choice((1, 4, 60))]
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)
