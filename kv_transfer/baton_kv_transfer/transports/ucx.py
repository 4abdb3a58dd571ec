"""Transport over UCX: one-sided get and put through libucp, driven by one progress thread per agent.

The thread owns the UCP worker: everything that touches it arrives as a command. While nothing happens it sleeps on the
worker's event descriptor. The owner of memory being read takes no part in a read beyond this thread (needed where a
network has no remote direct memory access and UCX emulates it: tcp, shared memory without cross-memory attach).

A peer's death is seen by UCX (endpoint error handling mode PEER: reset connections at once, silent ones by keepalive)
and ends every operation towards it in ERR. Operations end only when UCX gave back all their requests. That mode has a
price: UCX 1.21 has no shared-memory or cross-memory-attach lanes in it, so two processes of one host talk over tcp.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports import libucp
from baton_kv_transfer.transports.base import Descriptors, Operation, Region, Transport, TransportError, XferState

logger = logging.getLogger(__name__)

MAX_POSTED = 64
"""Requests of one operation that UCX holds at a time."""
MAX_REQUEST_BYTES = 8 * 2**20
"""Longer descriptors are split, so that the thread returns to its other work."""
KEEPALIVE = "2s"
"""How often UCX probes silent peers; UCX_KEEPALIVE_INTERVAL in the environment wins."""
CALL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
_NOTIF_AM_ID = 1
_AM_FLAG_RNDV = 1 << 17  # UCP_AM_RECV_ATTR_FLAG_RNDV: the payload is not there yet; our notifications never ask for it

_T = TypeVar("_T")


class _Endpoint:
    """A peer: its worker address and, once used, UCX's endpoint and unpacked remote keys."""

    def __init__(self, name: str, address: bytes, regions: list[Region]) -> None:
        self.name = name
        self.address = address
        self.regions = regions
        self.handle: int | None = None
        self.rkeys: list[int | None] = [None] * len(regions)
        self.error = ""
        self.close_request: int | None = None


class _UCXOperation(Operation):
    """Progress of one posted batch; touched by the progress thread only, save for `state`."""

    def __init__(self, op: str, endpoint: _Endpoint, rows: list[tuple[int, int, int, int]], notif: bytes) -> None:
        self.op = op
        self.endpoint = endpoint
        self.rows = rows  # (local address, remote address, length, region), consumed from the end
        self.notif = notif  # kept until the end: UCX may send from it
        self.needs_notif = bool(notif)
        self.pending: deque[int] = deque()
        self.needs_flush = op == "WRITE"
        self.error = ""
        self._state = XferState.PROC

    @property
    def state(self) -> XferState:
        return self._state

    def finish(self) -> None:
        self._state = XferState.ERR if self.error else XferState.DONE


class UCXTransport(Transport):
    def __init__(self, name: str) -> None:
        self._name = name.encode()
        self._ucp = libucp.load()
        self._no_params = libucp.RequestParam()
        self._inbox: deque[Callable[[], None]] = deque()
        self._endpoints: dict[str, _Endpoint] = {}
        self._by_handle: dict[int, _Endpoint] = {}
        self._closing: list[_Endpoint] = []
        self._operations: list[_UCXOperation] = []
        self._memory: dict[int, tuple[Region, int]] = {}
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None
        self._stopping = False
        self._on_error = libucp.ErrorCallback(self._endpoint_failed)  # kept: UCX holds the pointers
        self._on_notif = libucp.AmCallback(self._notif_arrived)
        self._context = self._create_context(name)
        self._worker = self._create_worker()
        self._worker_address = self._get_address()
        self._event_fd = self._get_event_fd()
        self._signal_lock = threading.Lock()  # the worker must outlive a signal under way
        self._thread = threading.Thread(target=self._run, name=f"ucx-{name}", daemon=True)
        self._thread.start()

    # -- called from any thread

    def address(self) -> bytes:
        return self._worker_address

    def register(self, address: int, length: int) -> Region:
        return self._call(lambda: self._map(address, length))

    def deregister(self, region: Region) -> None:
        self._call(lambda: self._unmap(region))

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        endpoint = _Endpoint(name, address, regions)
        self._submit(lambda: self._replace_endpoint(name, endpoint))

    def remove_peer(self, name: str) -> None:
        with contextlib.suppress(TransportError):  # closed: all peers are disconnected
            self._submit(lambda: self._replace_endpoint(name, None))

    def post(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation:
        rows = list(
            zip(local[:, 0].tolist(), remote[:, 0].tolist(), local[:, 1].tolist(), regions.tolist(), strict=True)
        )
        rows.reverse()
        operation = _UCXOperation(op, _Endpoint(peer, b"", []), rows, notif)
        self._submit(lambda: self._begin(operation, peer))
        return operation

    def send_notif(self, peer: str, message: bytes) -> None:
        operation = _UCXOperation("NOTIF", _Endpoint(peer, b"", []), [], message)
        self._submit(lambda: self._begin(operation, peer))

    def take_notifs(self) -> list[tuple[str, bytes]]:
        return [self._notifs.popleft() for _ in range(len(self._notifs))]

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup

    def close(self) -> None:
        with self._signal_lock:
            if self._stopping:
                return
            self._stopping = True
            self._ucp.ucp_worker_signal(self._worker)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the UCX progress thread did not end within %.0f s; its memory stays mapped", CLOSE_TIMEOUT_S)

    def _submit(self, command: Callable[[], None]) -> None:
        with self._signal_lock:
            if self._stopping:
                raise TransportError("the transport is closed")
            self._inbox.append(command)
            self._ucp.ucp_worker_signal(self._worker)

    def _call(self, function: Callable[[], _T]) -> _T:
        """Runs `function` on the progress thread and returns what it returned."""
        future: Future[_T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # whatever it is belongs to the caller
                future.set_exception(error)

        self._submit(command)
        return future.result(CALL_TIMEOUT_S)

    # -- set-up, before the thread starts

    def _create_context(self, name: str) -> int:
        ucp = self._ucp
        config = c.c_void_p()
        libucp.check(ucp.ucp_config_read(None, None, c.byref(config)), "ucp_config_read")
        try:
            if "UCX_KEEPALIVE_INTERVAL" not in os.environ:
                status = ucp.ucp_config_modify(config, b"KEEPALIVE_INTERVAL", KEEPALIVE.encode())
                libucp.check(status, "ucp_config_modify(KEEPALIVE_INTERVAL)")
            params = libucp.Params(
                field_mask=libucp.PARAM_FEATURES | libucp.PARAM_NAME,
                features=libucp.FEATURE_RMA | libucp.FEATURE_AM | libucp.FEATURE_WAKEUP,
                name=name.encode(),
            )
            context = c.c_void_p()
            status = ucp.ucp_init_version(*libucp.API_VERSION, c.byref(params), config, c.byref(context))
            libucp.check(status, "ucp_init (is UCX_TLS or UCX_NET_DEVICES set to something this machine lacks?)")
        finally:
            ucp.ucp_config_release(config)
        assert context.value is not None
        return context.value

    def _create_worker(self) -> int:
        params = libucp.WorkerParams(field_mask=libucp.WORKER_THREAD_MODE, thread_mode=libucp.THREAD_MODE_SERIALIZED)
        worker = c.c_void_p()
        status = self._ucp.ucp_worker_create(self._context, c.byref(params), c.byref(worker))
        libucp.check(status, "ucp_worker_create")
        handler = libucp.AmHandlerParam(
            field_mask=libucp.AM_PARAM_ID | libucp.AM_PARAM_CB, id=_NOTIF_AM_ID, cb=self._on_notif
        )
        status = self._ucp.ucp_worker_set_am_recv_handler(worker, c.byref(handler))
        libucp.check(status, "ucp_worker_set_am_recv_handler")
        assert worker.value is not None
        return worker.value

    def _get_address(self) -> bytes:
        address, length = c.c_void_p(), c.c_size_t()
        status = self._ucp.ucp_worker_get_address(self._worker, c.byref(address), c.byref(length))
        libucp.check(status, "ucp_worker_get_address")
        packed = c.string_at(address, length.value)
        self._ucp.ucp_worker_release_address(self._worker, address)
        return packed

    def _get_event_fd(self) -> int:
        fd = c.c_int()
        libucp.check(self._ucp.ucp_worker_get_efd(self._worker, c.byref(fd)), "ucp_worker_get_efd")
        return fd.value

    # -- the progress thread

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._event_fd, select.POLLIN)
        progress, worker = self._ucp.ucp_worker_progress, self._worker
        try:
            while not self._stopping:
                busy = bool(self._inbox)
                while self._inbox:
                    self._inbox.popleft()()
                for _ in range(MAX_POSTED):
                    if not progress(worker):
                        break
                    busy = True
                if self._advance() or busy:
                    continue
                status = self._ucp.ucp_worker_arm(worker)  # BUSY: events came since the last progress
                if status == libucp.OK:
                    poller.poll(1000)
                elif status != libucp.ERR_BUSY:
                    libucp.check(status, "ucp_worker_arm")
        except Exception:
            logger.exception("the UCX progress thread failed; all transfers of this agent end")
        self._shut_down()

    def _advance(self) -> bool:
        """One round over all operations and closing endpoints; true if anything moved."""
        moved = False
        running: list[_UCXOperation] = []
        for operation in self._operations:
            moved |= self._advance_operation(operation)
            if operation.rows or operation.pending or operation.needs_flush or operation.needs_notif:
                running.append(operation)
            else:
                operation.finish()
                if operation.op == "NOTIF" and operation.error:
                    logger.warning("notification to %s was lost: %s", operation.endpoint.name, operation.error)
                self._wakeup()
        self._operations = running
        for endpoint in list(self._by_handle.values()):
            if endpoint.error and endpoint.close_request is None:
                self._close_endpoint(endpoint)
                moved = True
        for endpoint in list(self._closing):
            moved |= self._finish_close(endpoint)
        return moved

    def _advance_operation(self, operation: _UCXOperation) -> bool:
        moved = False
        pending, endpoint = operation.pending, operation.endpoint
        while pending:  # oldest first: requests mostly end in order
            status = self._ucp.ucp_request_check_status(pending[0])
            if status == libucp.INPROGRESS:
                break
            self._ucp.ucp_request_free(pending.popleft())
            moved = True
            if status != libucp.OK:
                operation.error = operation.error or endpoint.error or libucp.status_text(status)
        if endpoint.error:
            operation.error = operation.error or endpoint.error
        if operation.error:  # nothing more is posted; what is posted has to come back first
            operation.rows, operation.needs_flush, operation.needs_notif = [], False, False
            return moved
        while operation.rows and len(pending) < MAX_POSTED and not operation.error:
            self._post_row(operation)
            moved = True
        if not pending and not operation.rows and not operation.error:
            if operation.needs_flush:
                operation.needs_flush = False
                self._track(operation, self._ucp.ucp_ep_flush_nbx(endpoint.handle, c.byref(self._no_params)))
                moved = True
            elif operation.needs_notif:
                operation.needs_notif = False
                self._track(operation, self._send_am(endpoint, operation.notif))
                moved = True
        return moved

    def _post_row(self, operation: _UCXOperation) -> None:
        local, remote, length, region = operation.rows.pop()
        if length > MAX_REQUEST_BYTES:
            rest = length - MAX_REQUEST_BYTES
            operation.rows.append((local + MAX_REQUEST_BYTES, remote + MAX_REQUEST_BYTES, rest, region))
            length = MAX_REQUEST_BYTES
        endpoint = operation.endpoint
        function = self._ucp.ucp_get_nbx if operation.op == "READ" else self._ucp.ucp_put_nbx
        pointer = function(endpoint.handle, local, length, remote, endpoint.rkeys[region], c.byref(self._no_params))
        self._track(operation, pointer)

    def _send_am(self, endpoint: _Endpoint, message: bytes) -> int | None:
        params = libucp.RequestParam(
            op_attr_mask=libucp.OP_ATTR_FLAGS, flags=libucp.AM_SEND_EAGER | libucp.AM_SEND_COPY_HEADER
        )
        pointer: int | None = self._ucp.ucp_am_send_nbx(
            endpoint.handle, _NOTIF_AM_ID, self._name, len(self._name), message, len(message), c.byref(params)
        )
        return pointer

    def _track(self, operation: _UCXOperation, pointer: int | None) -> None:
        status = libucp.pointer_status(pointer)
        if status == libucp.INPROGRESS:
            assert pointer is not None
            operation.pending.append(pointer)
        elif status != libucp.OK:
            operation.error = operation.error or operation.endpoint.error or libucp.status_text(status)

    def _begin(self, operation: _UCXOperation, peer: str) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            operation.error = f"agent {peer} is not known: add_remote_agent first"
        else:
            operation.endpoint = endpoint
            if endpoint.handle is None and not endpoint.error:
                self._connect(endpoint)
        self._operations.append(operation)

    def _connect(self, endpoint: _Endpoint) -> None:
        address = c.create_string_buffer(endpoint.address, len(endpoint.address))
        params = libucp.EpParams(
            field_mask=libucp.EP_REMOTE_ADDRESS | libucp.EP_ERR_HANDLING_MODE | libucp.EP_ERR_HANDLER,
            address=c.addressof(address),
            err_mode=libucp.ERR_HANDLING_PEER,
            err_handler_cb=self._on_error,
        )
        handle = c.c_void_p()
        status = self._ucp.ucp_ep_create(self._worker, c.byref(params), c.byref(handle))
        if status != libucp.OK:
            endpoint.error = f"no connection to {endpoint.name}: {libucp.status_text(status)}"
            return
        assert handle.value is not None
        endpoint.handle = handle.value
        self._by_handle[handle.value] = endpoint
        for index, region in enumerate(endpoint.regions):
            rkey = c.c_void_p()
            status = self._ucp.ucp_ep_rkey_unpack(handle, region.key, c.byref(rkey))
            if status != libucp.OK:
                endpoint.error = f"memory of {endpoint.name} cannot be reached: {libucp.status_text(status)}"
                return
            endpoint.rkeys[index] = rkey.value

    def _replace_endpoint(self, name: str, endpoint: _Endpoint | None) -> None:
        old = self._endpoints.pop(name, None)
        if old is not None and not old.error:
            old.error = f"agent {name} was removed"
        if endpoint is not None:
            self._endpoints[name] = endpoint

    def _close_endpoint(self, endpoint: _Endpoint) -> None:
        params = libucp.RequestParam(op_attr_mask=libucp.OP_ATTR_FLAGS, flags=libucp.EP_CLOSE_FORCE)
        pointer = self._ucp.ucp_ep_close_nbx(endpoint.handle, c.byref(params))
        endpoint.close_request = pointer if libucp.pointer_status(pointer) == libucp.INPROGRESS else 0
        self._closing.append(endpoint)

    def _finish_close(self, endpoint: _Endpoint) -> bool:
        """Remote keys are destroyed once the endpoint and every operation that used them ended."""
        if endpoint.close_request:
            if self._ucp.ucp_request_check_status(endpoint.close_request) == libucp.INPROGRESS:
                return False
            self._ucp.ucp_request_free(endpoint.close_request)
            endpoint.close_request = 0
        if any(operation.endpoint is endpoint for operation in self._operations):
            return False
        for rkey in endpoint.rkeys:
            if rkey is not None:
                self._ucp.ucp_rkey_destroy(rkey)
        assert endpoint.handle is not None
        if self._by_handle.get(endpoint.handle) is endpoint:  # UCX may have given the handle to a new endpoint already
            del self._by_handle[endpoint.handle]
        self._closing.remove(endpoint)
        return True

    def _endpoint_failed(self, _arg: int, handle: int, status: int) -> None:
        """UCX's error callback, inside ucp_worker_progress: only notes the fact, closing happens outside."""
        endpoint = self._by_handle.get(handle)
        if endpoint is not None and not endpoint.error:
            endpoint.error = f"connection to {endpoint.name} lost: {libucp.status_text(status)}"

    def _notif_arrived(self, _arg: int, header: int, header_len: int, data: int, length: int, param: int) -> int:
        if header_len and not c.c_uint64.from_address(param).value & _AM_FLAG_RNDV:
            sender = c.string_at(header, header_len).decode(errors="replace")
            self._notifs.append((sender, c.string_at(data, length)))
            self._wakeup()
        return libucp.OK

    def _map(self, address: int, length: int) -> Region:
        params = libucp.MemMapParams(
            field_mask=libucp.MEM_MAP_ADDRESS | libucp.MEM_MAP_LENGTH, address=address, length=length
        )
        memh = c.c_void_p()
        status = self._ucp.ucp_mem_map(self._context, c.byref(params), c.byref(memh))
        libucp.check(status, f"ucp_mem_map of {length} bytes")
        buffer, size = c.c_void_p(), c.c_size_t()
        status = self._ucp.ucp_rkey_pack(self._context, memh, c.byref(buffer), c.byref(size))
        libucp.check(status, "ucp_rkey_pack")
        region = Region(address, length, c.string_at(buffer, size.value))
        self._ucp.ucp_rkey_buffer_release(buffer)
        assert memh.value is not None
        self._memory[address] = (region, memh.value)
        return region

    def _unmap(self, region: Region) -> None:
        _, memh = self._memory.pop(region.address)
        libucp.check(self._ucp.ucp_mem_unmap(self._context, memh), "ucp_mem_unmap")

    def _shut_down(self) -> None:
        with self._signal_lock:  # from here on nobody signals the worker
            self._stopping = True
        while self._inbox:  # callers that wait for an answer get it
            self._inbox.popleft()()
        for endpoint in self._by_handle.values():
            endpoint.error = endpoint.error or "the transport was closed"
        for operation in self._operations:
            operation.error = operation.error or "the transport was closed"
        deadline = time.monotonic() + CLOSE_TIMEOUT_S / 2
        self._advance()
        while (self._closing or self._operations) and time.monotonic() < deadline:
            self._ucp.ucp_worker_progress(self._worker)
            self._advance()
        if self._closing or self._operations:
            logger.error("UCX did not give back %d operations; its worker stays", len(self._operations))
            return
        for region, _ in list(self._memory.values()):
            self._unmap(region)
        self._ucp.ucp_worker_destroy(self._worker)
        self._ucp.ucp_cleanup(self._context)
