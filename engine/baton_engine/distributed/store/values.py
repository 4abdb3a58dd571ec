"""The keys and values of a store, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton_engine.distributed.store.wire import (
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    Add,
    Append,
    Check,
    CompareSet,
    CountKeys,
    Delete,
    Request,
    Set,
    StoreReply,
)

MAX_KEYS = 2**20
#: Maximum of the characters of all keys plus the bytes of all values.
MAX_BYTES = 2**28
#: Maximum number of keys in one request. Other clients wait while the store reads these keys.
MAX_KEYS_AT_ONCE = 2**14
#: Maximum length of a value to which Add adds. The time to parse a number grows with the square of
#: its length.
MAX_DIGITS = 30


class Values:
    """The keys and values of a rendezvous store, in memory."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._nbytes = 0

    def apply(self, request: Request) -> StoreReply:
        """Apply a request other than Get, and return the reply.

        Raises:
            ValueError: the request is refused, and no value has changed.
        """
        values = self._values
        match request:
            case Set():
                self._put(request.values)
            case Add(key, amount):
                total = _number(values.get(key, b"0")) + amount
                self._put({key: str(total).encode()})
                return StoreReply(number=total)
            case Append(key, value):
                before = values.get(key, b"")
                if len(before) + len(value) > MAX_REQUEST_BYTES:
                    raise ValueError(f"values have at most {MAX_REQUEST_BYTES} bytes")
                self._put({key: before + value})
            case CompareSet(key, expected, desired):
                if values.get(key, b"") == expected:
                    self._put({key: desired})
                return StoreReply([values.get(key, expected)])
            case Check(keys):
                return StoreReply(number=int(self.missing(keys) is None))
            case Delete(key):
                return StoreReply(number=int(self._remove(key)))
            case CountKeys():
                return StoreReply(number=len(values))
        return StoreReply()

    def missing(self, keys: Sequence[str]) -> str | None:
        """Return the first of these keys that does not exist, or None if all exist.

        Raises:
            ValueError: `keys` has more keys than one request may have.
        """
        if len(keys) > MAX_KEYS_AT_ONCE:
            raise ValueError(f"a request has at most {MAX_KEYS_AT_ONCE} keys, got {len(keys)}")
        return next((key for key in keys if key not in self._values), None)

    def get(self, keys: Sequence[str]) -> StoreReply:
        """Return the values of these keys, which must all exist.

        Raises:
            ValueError: the values do not fit into one message.
        """
        nbytes = sum(len(self._values[key]) for key in keys)
        if nbytes > MAX_MESSAGE_BYTES - 16 * (len(keys) + 1):
            raise ValueError(
                f"the values have {nbytes} bytes; a message holds at most {MAX_MESSAGE_BYTES}"
            )
        return StoreReply([self._values[key] for key in keys])

    def forget(self, is_outdated: Callable[[str], bool]) -> None:
        """Remove all keys for which `is_outdated` returns True."""
        for key in [key for key in self._values if is_outdated(key)]:
            self._remove(key)

    def _remove(self, key: str) -> bool:
        """Remove a key and return whether it existed."""
        removed = self._values.pop(key, None)
        if removed is None:
            return False
        self._nbytes -= _size(key, removed)
        return True

    def _put(self, new: dict[str, bytes]) -> None:
        if len(new) > MAX_KEYS_AT_ONCE:
            raise ValueError(f"a request has at most {MAX_KEYS_AT_ONCE} keys, got {len(new)}")
        values = self._values
        nbytes = self._nbytes
        num_keys = len(values)
        for key, value in new.items():
            before = values.get(key)
            num_keys += before is None
            nbytes += _size(key, value) - (0 if before is None else _size(key, before))
        if num_keys > max(MAX_KEYS, len(values)):
            raise ValueError(f"the store is full: it holds {MAX_KEYS} keys")
        if nbytes > max(MAX_BYTES, self._nbytes):
            raise ValueError(f"the store is full: it holds {MAX_BYTES} bytes")
        values.update(new)
        self._nbytes = nbytes


def _number(value: bytes) -> int:
    if len(value) > MAX_DIGITS:
        raise ValueError("the value is not a number")
    return int(value)


def _size(key: str, value: bytes) -> int:
    """Return the size of an entry: the characters of its key plus the bytes of its value."""
    return len(key) + len(value)
