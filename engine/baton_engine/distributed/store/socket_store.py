"""The client of a store, as a torch Store.

Baton does not use torch's TCPStore. The server of a TCPStore resolves each peer's name in the
thread that serves all ranks. A lost DNS response therefore blocks all ranks for seconds.
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

from baton_engine.distributed.store.handshake import authenticate
from baton_engine.distributed.store.wire import (
    Add,
    Append,
    Check,
    CompareSet,
    CountKeys,
    Delete,
    Get,
    Request,
    Set,
    StoreAddress,
    StoreReply,
    connect,
    exchange,
    frame,
    left_s,
    numeric,
)

#: Pause between two attempts to connect.
RETRY_S = 0.05


def connect_store(address: StoreAddress, timeout_s: float, secret: bytes = b"") -> Store:
    """Return a client of a rendezvous store. Wait until the store is open.

    Args:
        address: address of the store.
        timeout_s: timeout of this call, and of the client's methods.
        secret: secret that the server and its clients must prove to have. Empty: no secret.

    Raises:
        TimeoutError: no store with this secret responded.
    """
    return SocketStore(address, timeout_s, secret)


class SocketStore(Store):
    """A client of a `StoreServer`. Thread-safe: a call that waits does not block other calls.

    Methods raise DistStoreError after the timeout, or if the store refuses the request. If the
    store is gone, they raise DistNetworkError without waiting. torch's C++ code calls some methods
    by their C++ names. A PrefixStore does not keep its SocketStore alive, so the caller must keep a
    reference to the SocketStore.
    """

    #: Set by torch in `set_timeout`.
    timeout: timedelta

    def __init__(self, address: StoreAddress, timeout_s: float, secret: bytes) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._secret = secret
        self._lock = threading.Lock()
        #: Connections that are not in use.
        self._idle: list[socket.socket] = []
        self._address, connection = _connect_first(address, timeout_s, secret)
        self._idle.append(connection)
        weakref.finalize(self, _close_all, self._idle)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Set({key: _as_bytes(value)}))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
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
        """Wait for all keys and return their values."""
        return self._ask(Get(list(keys))).values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(Set(dict(zip(keys, map(_as_bytes, values), strict=True))))

    def has_extended_api(self) -> bool:
        return True

    def _ask(self, request: Request, timeout: timedelta | None = None) -> StoreReply:
        timeout_s = (self.timeout if timeout is None else timeout).total_seconds()
        where = f"the rendezvous store at {self._address.host}:{self._address.port}"
        message, deadline = frame(request), time.monotonic() + timeout_s
        try:
            with self._connection(deadline) as connection:
                answer = exchange(connection, message, StoreReply, deadline)
        except TimeoutError as error:
            raise DistStoreError(
                f"{where} did not answer {request!r:.200} within {timeout_s:g} s"
            ) from error
        except (OSError, ValueError) as error:  # a DecodeError is a ValueError
            raise DistNetworkError(f"{where} is gone: {error}") from error
        if answer.error:
            raise DistStoreError(f"{where} refused {request!r:.200}: {answer.error}")
        return answer

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[socket.socket]:
        """Provide a connection for one request, as a context manager.

        If the `with` block raises an exception, the connection is closed. A later request can
        therefore not receive the late answer to this request.
        """
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _connect(self._address, self._secret, deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)


def _connect_first(
    address: StoreAddress, timeout_s: float, secret: bytes
) -> tuple[StoreAddress, socket.socket]:
    """Resolve the host name and connect, with retries until the timeout.

    Returns:
        The numeric address and the connection.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            address = StoreAddress(numeric(address.host), address.port)
            return address, _connect(address, secret, deadline)
        except (OSError, ValueError) as error:
            if time.monotonic() + RETRY_S > deadline:
                raise TimeoutError(
                    f"no rendezvous store responded at {address.host}:{address.port} "
                    f"within {timeout_s:g} s ({error})"
                ) from error
        time.sleep(RETRY_S)


def _connect(address: StoreAddress, secret: bytes, deadline: float) -> socket.socket:
    """Connect to a store and authenticate.

    Raises:
        OSError: no store listens at the address, or the store has another secret.
        ValueError: the store's answer is not a message of the handshake.
    """
    connection = connect(address, left_s(deadline))
    if secret:
        try:
            authenticate(connection, secret, deadline)
        except BaseException:
            connection.close()
            raise
    return connection


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
