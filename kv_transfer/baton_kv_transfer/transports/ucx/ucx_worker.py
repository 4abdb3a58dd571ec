"""UCX's context and worker: endpoints, and tag messages that call back when they end."""

from __future__ import annotations

import ctypes as c
import ipaddress
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from baton_kv_transfer.transports.iovec import RUN_BYTES, pack_run
from baton_kv_transfer.transports.ucx import library
from baton_kv_transfer.transports.ucx.library import UCXError

#: Shorter messages are sent without waiting for the receiver. The receiver fetches longer messages,
#: so a longer message ends only if the receiver is alive.
RENDEZVOUS_BYTES = 2**16
#: UCX's settings. Environment variables UCX_* override them.
SETTINGS = {
    "TLS": "^sm",  # UCX's shared memory aborts a process whose peer dies
    "TCP_TX_SEG_SIZE": "256K",  # two to three times the throughput of the defaults (8K, 64K)
    "TCP_RX_SEG_SIZE": "513K",  # a piece of a transfer and its header
    "TCP_CONN_NB": "y",  # one host that does not answer must not delay the other peers
    "TCP_SYN_CNT": "1",
    "KEEPALIVE_INTERVAL": "500ms",
    # A shorter message is one fragment, and longer ones use rendezvous: UCX never completes a
    # receive that has only some fragments of its message.
    "RNDV_THRESH": str(RENDEZVOUS_BYTES),
    "ZCOPY_THRESH": str(RENDEZVOUS_BYTES),
}
#: Messages up to this size arrive in order. The size is far below RNDV_THRESH and a segment's size.
MAX_EAGER_BYTES = 4096
#: How long a destroyed worker may take to end messages whose senders are gone.
DRAIN_TIMEOUT_S = 0.2
#: Held while a worker opens listening sockets, so that no worker counts another worker's sockets.
_CREATION = threading.Lock()


class UCXContext:
    """A UCX context with Baton's settings, which creates workers."""

    def __init__(self, host: str) -> None:
        """Start UCX.

        Args:
            host: address of this machine. TCP uses only the network device with this address.

        Raises:
            UCXError: UCX is missing or cannot start.
        """
        self._ucxx = library.load_ucxx()
        settings = SETTINGS | {"NET_DEVICES": find_devices(host)}
        features = (self._ucxx.Feature.TAG, self._ucxx.Feature.WAKEUP)
        try:
            self._context = self._ucxx.UCXContext(
                {key: value for key, value in settings.items() if f"UCX_{key}" not in os.environ},
                features,
            )
        except self._ucxx.UCXError as error:
            raise UCXError(
                f"UCX cannot start: {error} (does UCX_TLS or UCX_NET_DEVICES name something that "
                "this machine lacks?)"
            ) from error

    @property
    def max_eager_bytes(self) -> int:
        """Size in bytes up to which UCX delivers messages in the order of sending.

        The value is 0 if an environment variable UCX_RNDV* is set, because such a variable may
        change UCX's thresholds.
        """
        has_thresholds = any(name.startswith("UCX_RNDV") for name in os.environ)
        return 0 if has_thresholds else MAX_EAGER_BYTES

    @property
    def has_cuda(self) -> bool:
        attributes = library.ContextAttr(field_mask=library.CONTEXT_ATTR_MEMORY_TYPES)
        status = library.load().ucp_context_query(self._context.handle, c.byref(attributes))
        return status == library.OK and bool(
            attributes.memory_types >> library.MEMORY_TYPE_CUDA & 1
        )

    def create_worker(self) -> UCXWorker:
        """Return a new worker.

        Raises:
            UCXError: the network is down.
        """
        with _CREATION:
            others = _find_listeners()
            try:
                worker = self._ucxx.UCXWorker(self._context)
            except self._ucxx.UCXError as error:
                raise UCXError(f"UCX cannot create a worker: {error}") from error
            ours = {fd: name for fd, name in _find_listeners().items() if fd not in others}
        return UCXWorker(self._ucxx, worker, ours)


def find_devices(host: str) -> str:
    """Return UCX_NET_DEVICES: the network interface with address `host`, and all RDMA devices."""
    devices = [
        f"{port.parts[-3]}:{port.name}" for port in Path("/sys/class/infiniband").glob("*/ports/*")
    ]
    return ",".join([_find_interface(host), *sorted(devices)])


def _find_interface(host: str) -> str:
    """Return the name of the network interface that has the address `host`.

    Raises:
        OSError: no interface has this address.
    """
    wanted = ipaddress.ip_address(host)
    if wanted.is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            ip = address.family in (socket.AF_INET, socket.AF_INET6)
            if ip and ipaddress.ip_address(address.address.partition("%")[0]) == wanted:
                return name
    raise OSError(
        f"KV transfers cannot be served at {host}: no network device of this machine has that "
        "address"
    )


def _find_listeners() -> dict[int, str]:
    """Return the listening TCP sockets of this process: file descriptor to name of the socket."""
    sockets = psutil.Process().net_connections("tcp")
    return {s.fd: _name_socket(s.fd) for s in sockets if s.status == psutil.CONN_LISTEN}


def _name_socket(fd: int) -> str:
    """Return the name of the socket `fd`. If `fd` is reused, the new socket has another name."""
    return os.path.realpath(f"/proc/self/fd/{fd}")


class Buffer:
    """Memory of one tag message, as a list of runs.

    UCX gets a list even for a single run. With contiguous memory, UCX 1.21 ends the process when a
    rendezvous is aborted while UCX's registration cache is off. The cache is off when the process
    also has another UCX, such as NIXL's.
    """

    __slots__ = ("_runs", "address", "count", "nbytes")

    def __init__(self, runs: object, address: int, count: int, nbytes: int) -> None:
        """Wrap a list of runs that another object has allocated.

        Args:
            runs: the object that keeps the list allocated.
            address: address of the list, an array of struct iovec.
            count: number of runs.
            nbytes: sum of the lengths of all runs.
        """
        self._runs, self.address, self.count, self.nbytes = runs, address, count, nbytes

    @classmethod
    def of(cls, address: int, nbytes: int) -> Buffer:
        """Return a Buffer that refers to one run of memory.

        A receive into a Buffer of 0 bytes discards the message.
        """
        run = c.create_string_buffer(pack_run(address, nbytes), RUN_BYTES)
        return cls(run, c.addressof(run), 1 if nbytes else 0, nbytes)


class UCXRequest:
    """A tag message that UCX sends or receives."""

    __slots__ = ("_buffer", "nbytes", "on_end", "pointer")

    def __init__(self, buffer: Buffer | None, on_end: Callable[[str], None]) -> None:
        self._buffer = buffer  # kept allocated, because UCX reads its list of runs
        self.nbytes = buffer.nbytes if buffer else 0
        self.on_end = on_end
        self.pointer: int | None = None


class UCXWorker:
    """A UCX worker: its address, its endpoints and its tag messages.

    One thread at a time may call the methods.
    """

    def __init__(self, ucxx: Any, worker: Any, listeners: dict[int, str]) -> None:
        """Wrap a new worker of ucxx.

        Args:
            ucxx: the module with ucxx's classes.
            worker: the worker.
            listeners: name of each listening socket by file descriptor. Empty without TCP.
        """
        self._ucxx = ucxx
        self._ucp = library.load()
        self._worker = worker
        self._listeners = listeners
        worker.init_blocking_progress_mode()
        self.event_fd: int = worker.epoll_file_descriptor
        self.address: bytes = worker.address.tobytes()
        self._handle: int = worker.handle
        self._requests: dict[int, UCXRequest] = {}
        self._next_key = 0
        self._ended: deque[tuple[int, int, int]] = deque()  # key, status, bytes
        self._info = library.TagInfo()
        self._on_sent = library.SendCallback(self._sent)
        self._on_received = library.ReceiveCallback(self._received)
        mask = library.OP_ATTR_CALLBACK | library.OP_ATTR_USER_DATA | library.OP_ATTR_DATATYPE
        self._send = library.RequestParam(
            op_attr_mask=mask,
            datatype=library.DATATYPE_IOV,
            callback=c.cast(self._on_sent, c.c_void_p),
        )
        self._receive = library.RequestParam(
            op_attr_mask=mask | library.OP_ATTR_RECV_INFO,
            datatype=library.DATATYPE_IOV,
            callback=c.cast(self._on_received, c.c_void_p),
            recv_info=c.addressof(self._info),
        )

    @property
    def is_listening(self) -> bool:
        """Whether UCX still accepts TCP connections.

        UCX closes its listening socket if a call of accept fails.
        """
        return all(_name_socket(fd) == name for fd, name in self._listeners.items())

    def connect(self, address: bytes, on_close: Callable[[int], None], number: int) -> Any:
        """Connect to a remote worker and return ucxx's endpoint.

        Args:
            address: address of the remote worker.
            on_close: called with `number`, inside `progress`, when the endpoint fails.
            number: argument of on_close.

        Raises:
            UCXError: UCX cannot reach the address from here.
        """
        try:
            remote = self._ucxx.UCXAddress.create_from_buffer(address)
            endpoint = self._ucxx.UCXEndpoint.create_from_worker_address(self._worker, remote, True)
        except self._ucxx.UCXError as error:
            raise UCXError(str(error)) from error
        endpoint.set_close_callback(on_close, (number,))
        return endpoint

    def disconnect(self, endpoint: Any, on_end: Callable[[str], None]) -> None:
        """Close an endpoint by force. Its requests end, and it receives no more messages.

        A later `progress` calls `on_end(error)` when the endpoint is closed.
        """
        request, key = self._new_request(None, on_end)
        if endpoint.alive:
            endpoint.close_blocking()
            pointer = None
        else:  # ucxx does not close an endpoint that failed
            param = library.RequestParam(
                self._send.op_attr_mask | library.OP_ATTR_FLAGS,
                library.EP_CLOSE_FORCE,
                callback=self._send.callback,
                user_data=key,
            )
            pointer = self._ucp.ucp_ep_close_nbx(endpoint.handle, c.byref(param))
        self._begin(request, key, pointer)

    def send(
        self, endpoint: Any, tag: int, buffer: Buffer, on_end: Callable[[str], None]
    ) -> UCXRequest:
        """Send a tag message.

        A later `progress` calls `on_end(error)` when UCX has released the memory.
        """
        request, key = self._new_request(buffer, on_end)
        self._send.user_data = key
        pointer = self._ucp.ucp_tag_send_nbx(
            endpoint.handle, buffer.address, buffer.count, tag, c.byref(self._send)
        )
        return self._begin(request, key, pointer, buffer.nbytes)

    def receive(self, tag: int, buffer: Buffer, on_end: Callable[[str], None]) -> UCXRequest:
        """Post a receive for a tag message, which must be exactly as long as the buffer.

        A later `progress` calls `on_end(error)` when UCX has released the memory.
        """
        request, key = self._new_request(buffer, on_end)
        self._receive.user_data = key
        pointer = self._ucp.ucp_tag_recv_nbx(
            self._handle, buffer.address, buffer.count, tag, 2**64 - 1, c.byref(self._receive)
        )
        return self._begin(request, key, pointer, self._info.length)

    def probe(self, tag: int, mask: int) -> tuple[int, int] | None:
        """Remove and return an arrived message that no posted receive matches.

        The tag of the message equals `tag` in the bits of `mask`. The caller must pass the message
        to `take`, which receives the content.

        Returns:
            The message and its size in bytes; None if there is no such message.
        """
        message = self._ucp.ucp_tag_probe_nb(self._handle, tag, mask, 1, c.byref(self._info))
        return (message, self._info.length) if message else None

    def take(self, message: int, buffer: Buffer, on_end: Callable[[str], None]) -> UCXRequest:
        """Receive the content of a message that `probe` returned."""
        request, key = self._new_request(buffer, on_end)
        self._receive.user_data = key
        pointer = self._ucp.ucp_tag_msg_recv_nbx(
            self._handle, buffer.address, buffer.count, message, c.byref(self._receive)
        )
        return self._begin(request, key, pointer, self._info.length)

    def discard(self, tag: int, mask: int) -> None:
        """Discard all messages that `probe` would return for this tag and mask."""
        while arrived := self.probe(tag, mask):
            self.take(arrived[0], Buffer.of(0, 0), lambda error: None)

    def cancel(self, request: UCXRequest) -> None:
        """Cancel a receive that no message has matched.

        Other requests end when their endpoint is closed.
        """
        if request.pointer is not None:
            self._ucp.ucp_request_cancel(self._handle, request.pointer)

    def progress(self) -> None:
        """Let UCX make progress, and call `on_end` of the requests that ended."""
        self._worker.progress()
        self.call_back()

    def call_back(self) -> bool:
        """Call `on_end` of the requests that ended; return whether there were any."""
        has_ended = bool(self._ended)
        while self._ended:
            key, status, nbytes = self._ended.popleft()
            request = self._requests.pop(key)
            error = "" if status == library.OK else library.status_text(status)
            if not error and nbytes != request.nbytes:
                error = f"a message of {nbytes} bytes instead of {request.nbytes}"
            request.on_end(error)
        return has_ended

    def arm(self) -> bool:
        """Arm `event_fd`, so that it becomes readable at the next event.

        Returns:
            False if `event_fd` is not armed, because `progress` has more to do.
        """
        return not self._ended and bool(self._worker.arm())

    def query_lanes(self, endpoint: Any) -> str:
        """Return the UCX lanes of an endpoint, as TRANSPORT/DEVICE separated by commas.

        The result is `unknown` if the query fails.
        """
        entries = (library.TransportEntry * 32)()
        attributes = library.EpAttr(
            field_mask=library.EP_ATTR_TRANSPORTS,
            entries=c.addressof(entries),
            num_entries=len(entries),
            entry_size=c.sizeof(library.TransportEntry),
        )
        if self._ucp.ucp_ep_query(endpoint.handle, c.byref(attributes)) != library.OK:
            return "unknown"
        used = entries[: attributes.num_entries]
        return ",".join(
            sorted({f"{lane.transport_name.decode()}/{lane.device_name.decode()}" for lane in used})
        )

    def destroy(self) -> None:
        """Destroy the worker. All references to its endpoints must have been dropped before.

        Afterwards all requests have ended, and UCX touches no memory any more.
        """
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self._requests and time.monotonic() < deadline:
            self.progress()
        self.discard(0, 0)  # ucxx would wait for the rest of messages that a dead peer began
        self._worker = None
        self._ended.clear()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.pointer = None
            request.on_end("the connection was cut")

    def _new_request(
        self, buffer: Buffer | None, on_end: Callable[[str], None]
    ) -> tuple[UCXRequest, int]:
        self._next_key += 1
        request = self._requests[self._next_key] = UCXRequest(buffer, on_end)
        return request, self._next_key

    def _begin(
        self, request: UCXRequest, key: int, pointer: int | None, nbytes: int = 0
    ) -> UCXRequest:
        status = library.pointer_status(pointer)
        if status == library.INPROGRESS:
            request.pointer = pointer
        else:
            self._ended.append((key, status, nbytes))
        return request

    def _sent(self, pointer: int, status: int, key: int) -> None:
        """Record that a send or a disconnect has ended. UCX calls this in ucp_worker_progress."""
        request = self._requests[key]
        request.pointer = None
        self._ended.append((key, status, request.nbytes))
        self._ucp.ucp_request_free(pointer)

    def _received(self, pointer: int, status: int, info: Any, key: int) -> None:
        self._requests[key].pointer = None
        self._ended.append((key, status, info[0].length))
        self._ucp.ucp_request_free(pointer)
