"""A client of a store, as torch's process groups want it.

torch's own TCPStore asks a name server who its peers are, on every connection and, in the server, in the one thread that serves
all ranks: a lost answer stops everybody for seconds.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from baton_engine.distributed.store.handshake import introduce
from baton_engine.distributed.store.wire import (
    Add,
    Answer,
    Append,
    Check,
    CompareSet,
    CountKeys,
    Delete,
    Get,
    Request,
    Set,
    StoreAddress,
    connect,
    exchange,
    frame,
    left_s,
    numeric,
)

RETRY_S = 0.05


def connect_store(address: StoreAddress, timeout_s: float, secret: bytes = b"") -> Store:
    """Waits for a store that is not open yet.

    Args:
        timeout_s: of this, and of the store's calls.
        secret: the store's; see `store_proof`. Empty: it has none.

    Raises:
        TimeoutError: no store that has the secret answers there in time.
    """
    return SocketStore(address, timeout_s, secret)


class SocketStore(Store):
    """A `StoreServer` from outside. Any number of threads may call: who waits is in nobody's way.

    A call that needs longer than the timeout raises DistStoreError, one whose store is gone DistNetworkError, at once. C++ calls
    it as long as this object lives, which a PrefixStore does not keep alive, and some methods by their names there.
    """

    timeout: timedelta
    """What `set_timeout` has set; torch keeps it."""

    def __init__(self, address: StoreAddress, timeout_s: float, secret: bytes) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        """Connections that no call uses."""
        self._address, connection = _meet(address, timeout_s, secret)
        self._idle.append(connection)
        weakref.finalize(self, _close_all, self._idle)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Set({key: _as_bytes(value)}))

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        return self._ask(Get([key])).values[0]

    def add(self, key: str, amount: int) -> int:
        return self._ask(Add(key, amount)).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(CompareSet(key, _as_bytes(expected), _as_bytes(desired))).values[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(Get(list(keys)), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Check(list(keys))).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Delete(key)).number)

    def num_keys(self) -> int:
        return self._ask(CountKeys()).number

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Append(key, _as_bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for all keys."""
        return self._ask(Get(list(keys))).values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(Set(dict(zip(keys, map(_as_bytes, values), strict=True))))

    def has_extended_api(self) -> bool:
        return True

    def _ask(self, request: Request, timeout: timedelta | None = None) -> Answer:
        timeout_s = (self.timeout if timeout is None else timeout).total_seconds()
        where = f"the store at {self._address.host}:{self._address.port}"
        message, deadline = frame(request), time.monotonic() + timeout_s
        try:
            with self._connection(deadline) as connection:
                answer = exchange(connection, message, Answer, deadline)
        except TimeoutError as error:
            raise DistStoreError(
                f"{where} had no answer to {request!r:.200} within {timeout_s:g} s"
            ) from error
        except (OSError, ValueError) as error:  # a DecodeError is a ValueError
            raise DistNetworkError(f"{where} is gone: {error}") from error
        if answer.error:
            raise DistStoreError(f"{where} refused {request!r:.200}: {answer.error}")
        return answer

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[socket.socket]:
        """One for this call alone. It is closed after an error: an answer that comes too late must not be another call's."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _enter(self._address, self._secret, deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)


def _meet(
    address: StoreAddress, timeout_s: float, secret: bytes
) -> tuple[StoreAddress, socket.socket]:
    """The address in numbers, and the first connection."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            address = StoreAddress(numeric(address.host), address.port)
            return address, _enter(address, secret, deadline)
        except (OSError, ValueError) as error:
            if time.monotonic() + RETRY_S > deadline:
                raise TimeoutError(
                    f"no store answers at {address.host}:{address.port} within {timeout_s:g} s ({error})"
                ) from error
        time.sleep(RETRY_S)


def _enter(address: StoreAddress, secret: bytes, deadline: float) -> socket.socket:
    """Raises OSError or ValueError: nobody is there, or it is a store with another secret or none."""
    connection = connect(address, left_s(deadline))
    if secret:
        try:
            introduce(connection, secret, deadline)
        except BaseException:
            connection.close()
            raise
    return connection


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
