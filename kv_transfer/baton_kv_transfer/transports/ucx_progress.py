"""The progress thread: owns the UCP worker, its endpoints and the operations under way. Everything arrives as a command.

While nothing happens it sleeps on the worker's event descriptor. Operations end only when UCX gave back all their requests, or
the worker is gone. How a batch moves is the connection's: by get and put where the network has them, else by messages.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import logging
import select
import threading
import time
from collections.abc import Callable

from baton_kv_transfer.transports import libucp
from baton_kv_transfer.transports.base import Region, TransportError
from baton_kv_transfer.transports.mailbox import Mailbox
from baton_kv_transfer.transports.ucx_context import FRAME_AM_ID, NOTIF_AM_ID, UCXContext, UCXWorker
from baton_kv_transfer.transports.ucx_endpoints import Endpoint, Endpoints
from baton_kv_transfer.transports.ucx_messages import (
    Outgoing,
)
from baton_kv_transfer.transports.ucx_operation import UCXOperation
from baton_kv_transfer.transports.ucx_service import MessageService, Served

logger = logging.getLogger(__name__)

MAX_POSTED = 64
"""Requests of one operation that UCX holds at a time."""
MAX_REQUEST_BYTES = 8 * 2**20
"""Longer descriptors are split, so that the thread returns to its other work."""
CLOSE_TIMEOUT_S = 5.0
FENCE_TIMEOUT_S = 0.5
"""How long UCX may take to give requests back before the worker is destroyed under them."""
NETWORK_TIMEOUT_S = 20.0
"""After a fence without a network, connections can be made again once it is back; longer than this ends the agent."""
RETRY_S = 0.5


class ProgressThread(MessageService):
    """Methods without underscore may be called from any thread."""

    def __init__(self, name: str, deliver: Callable[[str, bytes], None], wakeup: Callable[[], None]) -> None:
        """
        Args:
            deliver: called by the thread with (sender, notification).
            wakeup: called after an operation ended.

        Raises:
            UCXError: UCX is missing or does not start.
        """
        super().__init__(name, deliver)
        self._packed_name = name.encode()
        self._wakeup = wakeup
        self._no_params = libucp.RequestParam()
        flags = libucp.AM_SEND_EAGER | libucp.AM_SEND_COPY_HEADER
        self._am_params = libucp.RequestParam(op_attr_mask=libucp.OP_ATTR_FLAGS, flags=flags)
        self._frame_params = libucp.RequestParam(
            op_attr_mask=libucp.OP_ATTR_FLAGS | libucp.OP_ATTR_DATATYPE, flags=flags, datatype=libucp.DATATYPE_IOV
        )
        self._context = UCXContext(name)
        self._ucp = self._context.ucp
        self._endpoints = Endpoints(self._ucp)
        self._worker = self._context.create_worker(self._handlers)
        self._mailbox = Mailbox(self._worker.signal)
        self._thread = threading.Thread(target=self._run, name=f"ucx-{name}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> bytes:
        return self._worker.address

    def register(self, address: int, length: int, mem_type: str, device_id: int) -> Region:
        return self._mailbox.call(lambda: self._context.map(address, length, mem_type, device_id))

    def deregister(self, region: Region) -> None:
        self._mailbox.call(lambda: self._deregister(region))

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        endpoint = Endpoint(name, address, regions)
        self._mailbox.submit(lambda: self._endpoints.replace_peer(name, endpoint))

    def remove_peer(self, name: str) -> None:
        with contextlib.suppress(TransportError):  # closed: all peers are disconnected
            self._mailbox.submit(lambda: self._endpoints.replace_peer(name, None))

    def begin(self, operation: UCXOperation) -> None:
        self._mailbox.submit(lambda: self._begin(operation))

    def fence(self) -> None:
        """Peers reach memory through connections of this worker only: they end with it. The memory stays registered."""
        self._mailbox.call(self._fence)

    def close(self) -> None:
        if self._mailbox.close():
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the UCX thread did not end within %.0f s; its memory stays mapped", CLOSE_TIMEOUT_S)

    # -- the thread's round

    def _run(self) -> None:
        try:
            while not (self._mailbox.closed or self._worker.destroyed):
                if not self._progress():
                    self._sleep()
        except Exception:
            logger.exception("the UCX progress thread failed; all transfers of this agent end")
        self._mailbox.finish()  # callers that wait for an answer get it
        if self._worker.destroyed:
            self._context.destroy()
        elif self._end_all("the transport was closed", CLOSE_TIMEOUT_S / 2):
            self._worker.destroy()
            self._context.destroy()

    def _progress(self) -> bool:
        """One round; true if anything moved."""
        moved = self._mailbox.run()
        if self._worker.destroyed:
            return True
        progress, worker = self._ucp.ucp_worker_progress, self._worker.handle
        for _ in range(MAX_POSTED):
            if not progress(worker):
                break
            moved = True
        return self._advance() or moved

    def _sleep(self) -> None:
        status = self._ucp.ucp_worker_arm(self._worker.handle)  # BUSY: events came since the last progress
        if status == libucp.OK:
            poller = select.poll()
            poller.register(self._worker.event_fd, select.POLLIN)
            poller.poll(1000)
        elif status != libucp.ERR_BUSY:
            libucp.check(status, "ucp_worker_arm")

    def _advance(self) -> bool:
        """One round over all operations and closing endpoints; true if anything moved."""
        moved = bool(self._requests or self._ended)
        while self._requests:
            self._serve(*self._requests.pop(0))
        while self._ended:
            self._answer(*self._ended.pop(0))
        operations, self._operations = self._operations, []  # new ones may be added meanwhile
        for operation in operations:
            moved |= self._advance_operation(operation)
            if operation.running:
                self._operations.append(operation)
            else:
                self._finish(operation)
                moved = True
        if self._endpoints.close_failed():
            moved = True
            for number, incoming in list(self._incoming.items()):
                if isinstance(incoming, Served) and incoming.client and incoming.client.error:
                    del self._incoming[number]
        return moved

    def _advance_operation(self, operation: UCXOperation) -> bool:
        moved = False
        pending, endpoint = operation.pending, operation.endpoint
        check_status = self._ucp.ucp_request_check_status
        while pending:  # oldest first: requests mostly end in order
            status = check_status(pending[0])
            if status == libucp.INPROGRESS:
                break
            self._ucp.ucp_request_free(pending.popleft())
            moved = True
            if status != libucp.OK:
                operation.error = operation.error or endpoint.error or libucp.status_text(status)
        if endpoint.error:
            operation.error = operation.error or endpoint.error
        if operation.error:
            operation.stop()
            self._incoming.pop(operation.number, None)
            return moved
        if operation.rows:
            moved |= self._post_rows(operation)
        elif operation.outgoing is not None:
            moved |= self._post_frames(operation, operation.outgoing)
        if not pending and not operation.rows and not operation.awaits_peer and not operation.error:
            if operation.needs_flush:
                operation.needs_flush = False
                self._track(operation, self._ucp.ucp_ep_flush_nbx(endpoint.handle, c.byref(self._no_params)))
                moved = True
            elif operation.needs_notif:
                operation.needs_notif = False
                self._send(operation, NOTIF_AM_ID, self._packed_name, operation.notif)
                moved = True
        return moved

    def _finish(self, operation: UCXOperation) -> None:
        operation.finish()
        if operation.error and operation.op == "NOTIF":
            logger.warning("notification to %s was lost: %s", operation.endpoint.name, operation.error)
        if operation.error and operation.request is not None and not operation.endpoint.error:
            self._ended.append((operation.request, operation.error))
        self._wakeup()

    # -- posting

    def _begin(self, operation: UCXOperation) -> None:
        if self._worker.destroyed:
            operation.error = "the transport lost its network"
            operation.finish()
            self._wakeup()
            return
        endpoint = self._endpoints.get_peer(self._worker, operation.endpoint.name)
        if endpoint is None:
            operation.error = f"agent {operation.endpoint.name} is not known: add_remote_agent first"
        else:
            operation.endpoint = endpoint
            if not endpoint.error and operation.op != "NOTIF":
                self._choose_way(operation)
        self._add(operation)

    def _add(self, operation: UCXOperation) -> None:
        operation.endpoint.num_operations += 1
        self._operations.append(operation)

    def _choose_way(self, operation: UCXOperation) -> None:
        endpoint = operation.endpoint
        if endpoint.accesses_device if operation.device else endpoint.accesses_host:
            keys = [endpoint.rkeys[region] for region in operation.regions.tolist()]
            sides = operation.local[:, 0].tolist(), operation.remote[:, 0].tolist(), operation.local[:, 1].tolist()
            operation.rows = list(zip(*sides, keys, strict=True))[::-1]
            operation.needs_flush = operation.op == "WRITE"
        elif operation.device:
            operation.error = (
                f"device memory of {endpoint.name} is not reached without a network that accesses remote memory: "
                "move it through host memory"
            )
        else:
            self._ask(operation)

    def _post_rows(self, operation: UCXOperation) -> bool:
        """By get or put. True if any was posted."""
        rows, pending, handle = operation.rows, operation.pending, operation.endpoint.handle
        function = self._ucp.ucp_get_nbx if operation.op == "READ" else self._ucp.ucp_put_nbx
        params, moved = c.byref(self._no_params), False
        while rows and len(pending) < MAX_POSTED and not operation.error:
            local, remote, length, key = rows.pop()
            if length > MAX_REQUEST_BYTES:
                rest = length - MAX_REQUEST_BYTES
                rows.append((local + MAX_REQUEST_BYTES, remote + MAX_REQUEST_BYTES, rest, key))
                length = MAX_REQUEST_BYTES
            pointer = function(handle, local, length, remote, key, params)
            moved = True
            if pointer:  # none: it is done
                self._track(operation, pointer)
        return moved

    def _post_frames(self, operation: UCXOperation, outgoing: Outgoing) -> bool:
        params, handle, moved = c.byref(self._frame_params), operation.endpoint.handle, False
        while not outgoing.done and len(operation.pending) < MAX_POSTED and not operation.error:
            header, rows, count = outgoing.next_frame()
            pointer = self._ucp.ucp_am_send_nbx(handle, FRAME_AM_ID, header, len(header), rows, count, params)
            self._track(operation, pointer)
            moved = True
        return moved

    def _send(self, operation: UCXOperation, am_id: int, header: bytes, message: bytes) -> None:
        operation.message = message
        pointer = self._ucp.ucp_am_send_nbx(
            operation.endpoint.handle, am_id, header, len(header), message, len(message), c.byref(self._am_params)
        )
        self._track(operation, pointer)

    def _track(self, operation: UCXOperation, pointer: int | None) -> None:
        status = libucp.pointer_status(pointer)
        if status == libucp.INPROGRESS:
            assert pointer is not None
            operation.pending.append(pointer)
        elif status != libucp.OK:
            operation.error = operation.error or operation.endpoint.error or libucp.status_text(status)

    # -- the end

    def _end_all(self, reason: str, timeout_s: float) -> bool:
        """Ends operations and endpoints; false if UCX has not given back all of them in time."""
        self._endpoints.fail_all(reason)
        self._forget_requests()
        for operation in self._operations:
            operation.error = operation.error or reason
        deadline = time.monotonic() + timeout_s
        self._advance()
        while (self._operations or not self._endpoints.all_closed) and time.monotonic() < deadline:
            self._ucp.ucp_worker_progress(self._worker.handle)
            self._forget_requests()
            self._advance()
        all_back = not self._operations and self._endpoints.all_closed
        if not all_back:
            logger.error("UCX did not give back %d operations within %.1f s", len(self._operations), timeout_s)
        return all_back

    def _forget_requests(self) -> None:
        self._requests.clear()
        self._ended.clear()
        self._incoming.clear()

    def _fence(self) -> None:
        everything_back = self._end_all("this agent cut all its peers off", FENCE_TIMEOUT_S)
        self._mailbox.replace_signal(lambda: None)
        self._worker.destroy()
        if not everything_back:  # what UCX did not give back is gone with the worker
            for operation in self._operations:
                operation.finish()
            self._operations = []
            self._endpoints.forget_all()
            self._wakeup()
        self._forget_requests()
        self._worker = self._create_worker()
        self._mailbox.replace_signal(self._worker.signal)

    def _create_worker(self) -> UCXWorker:
        """After a fence: perhaps the network is down, and that is why. Raises UCXError if it stays so for too long."""
        deadline = time.monotonic() + NETWORK_TIMEOUT_S
        while True:
            try:
                return self._context.create_worker(self._handlers)
            except libucp.UCXError as error:
                if time.monotonic() > deadline or self._mailbox.closed:
                    raise
                logger.warning("no new connections yet: %s", error)
                time.sleep(RETRY_S)
