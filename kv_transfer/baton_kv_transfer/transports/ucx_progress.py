"""The progress thread: owns the UCP worker, its endpoints and the operations under way. Everything arrives as a command.

While nothing happens it sleeps on the worker's event descriptor. Operations end only when UCX gave back all their requests, or
the worker is gone. A batch is gets or puts, where the connection accesses the peer's memory without its processor; UCX's
emulation of that (tcp) trusts whatever addresses a peer names, and UCX 1.21 ends the process that answers a read whose reader
died. What the connection does not access goes back to the transport.
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
from baton_kv_transfer.transports.transfer import Transfer
from baton_kv_transfer.transports.ucx_context import UCXContext, UCXWorker
from baton_kv_transfer.transports.ucx_endpoints import Endpoint, Endpoints
from baton_kv_transfer.transports.ucx_operation import UCXOperation

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


class ProgressThread:
    """Methods without underscore may be called from any thread."""

    def __init__(
        self,
        name: str,
        decline: Callable[[Transfer], None],
        notify: Callable[[str, bytes], None],
        wakeup: Callable[[], None],
    ) -> None:
        """
        Args:
            decline: called with transfers of host memory that the connection does not access.
            notify: called with (peer, notification) after all of a transfer was moved.
            wakeup: called after a transfer ended.

        Raises:
            UCXError: UCX is missing or does not start.
        """
        self._decline = decline
        self._notify = notify
        self._wakeup = wakeup
        self._operations: list[UCXOperation] = []
        self._no_params = libucp.RequestParam()
        self._context = UCXContext(name)
        self._ucp = self._context.ucp
        self._endpoints = Endpoints(self._ucp)
        self._worker = self._context.create_worker()
        self._mailbox = Mailbox(self._worker.signal)
        self._thread = threading.Thread(target=self._run, name=f"ucx-{name}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> bytes:
        return self._worker.address

    def register(self, address: int, length: int, mem_type: str, device_id: int) -> Region:
        return self._mailbox.call(lambda: self._context.map(address, length, mem_type, device_id))

    def deregister(self, region: Region) -> None:
        self._mailbox.call(lambda: self._context.unmap(region))

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        endpoint = Endpoint(name, address, regions)
        self._mailbox.submit(lambda: self._endpoints.replace_peer(name, endpoint))

    def remove_peer(self, name: str) -> None:
        with contextlib.suppress(TransportError):  # closed: all peers are disconnected
            self._mailbox.submit(lambda: self._endpoints.replace_peer(name, None))

    def begin(self, transfer: Transfer, device: bool) -> None:
        """`device`: the memory of one side is a device's."""
        self._mailbox.submit(lambda: self._begin(transfer, device))

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
        moved = False
        operations, self._operations = self._operations, []  # new ones may be added meanwhile
        for operation in operations:
            moved |= self._advance_operation(operation)
            if operation.running:
                self._operations.append(operation)
            else:
                self._finish(operation)
                moved = True
        return self._endpoints.close_failed() or moved

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
            return moved
        if operation.rows:
            moved |= self._post_rows(operation)
        if operation.needs_flush and not (pending or operation.rows or operation.error):
            operation.needs_flush = False
            self._track(operation, self._ucp.ucp_ep_flush_nbx(endpoint.handle, c.byref(self._no_params)))
            moved = True
        return moved

    def _finish(self, operation: UCXOperation) -> None:
        transfer = operation.transfer
        if transfer.notif and not operation.error:
            self._notify(transfer.peer, transfer.notif)
        operation.finish()
        self._wakeup()

    # -- posting

    def _begin(self, transfer: Transfer, device: bool) -> None:
        error = ""
        endpoint = None
        if self._worker.destroyed:
            error = "the transport lost its network"
        else:
            endpoint = self._endpoints.get_peer(self._worker, transfer.peer)
        if endpoint is None:
            error = error or f"agent {transfer.peer} is not known to UCX: add_remote_agent first"
        elif endpoint.error or (endpoint.accesses_device if device else endpoint.accesses_host):
            endpoint.num_operations += 1
            self._operations.append(UCXOperation(transfer, endpoint))
            return
        elif device:
            error = (
                f"device memory of {endpoint.name} is not reached without a network that accesses remote memory: "
                "move it through host memory"
            )
        if error:
            transfer.end(error)
            self._wakeup()
        else:
            self._decline(transfer)

    def _post_rows(self, operation: UCXOperation) -> bool:
        """By get or put. True if any was posted."""
        rows, pending, handle = operation.rows, operation.pending, operation.endpoint.handle
        function = self._ucp.ucp_get_nbx if operation.transfer.op == "READ" else self._ucp.ucp_put_nbx
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
        for operation in self._operations:
            operation.error = operation.error or reason
        deadline = time.monotonic() + timeout_s
        self._advance()
        while (self._operations or not self._endpoints.all_closed) and time.monotonic() < deadline:
            self._ucp.ucp_worker_progress(self._worker.handle)
            self._advance()
        all_back = not self._operations and self._endpoints.all_closed
        if not all_back:
            logger.error("UCX did not give back %d operations within %.1f s", len(self._operations), timeout_s)
        return all_back

    def _fence(self) -> None:
        everything_back = self._end_all("this agent cut all its peers off", FENCE_TIMEOUT_S)
        self._mailbox.replace_signal(lambda: None)
        self._worker.destroy()
        if not everything_back:  # what UCX did not give back is gone with the worker
            for operation in self._operations:
                operation.error = operation.error or "this agent cut all its peers off"
                operation.finish()
            self._operations = []
            self._endpoints.forget_all()
            self._wakeup()
        self._worker = self._create_worker()
        self._mailbox.replace_signal(self._worker.signal)

    def _create_worker(self) -> UCXWorker:
        """After a fence: perhaps the network is down, and that is why. Raises UCXError if it stays so for too long."""
        deadline = time.monotonic() + NETWORK_TIMEOUT_S
        while True:
            try:
                return self._context.create_worker()
            except libucp.UCXError as error:
                if time.monotonic() > deadline or self._mailbox.closed:
                    raise
                logger.warning("no new connections yet: %s", error)
                time.sleep(RETRY_S)
