"""Connections of the progress thread to peers, and which of them access memory without the peer's processor."""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

from baton_kv_transfer.transports import libucp
from baton_kv_transfer.transports.base import Region
from baton_kv_transfer.transports.ucx_context import UCXWorker

NETWORK_ACCESS = ("rc_", "dc_", "gga_")
_DEVICE_ACCESS = (*NETWORK_ACCESS, "cuda_ipc")
"""Beginnings of the names of UCX's transports that read and write a peer's memory (of a device) without its processor."""
_MAX_TRANSPORTS = 32


def has_network_access(tls: str | None) -> bool:
    """Whether this machine may have a network that accesses memory, and UCX_TLS of this value lets UCX use it."""
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        return False
    names = {name.strip() for name in (tls or "all").removeprefix("^").split(",")}
    if (tls or "").startswith("^"):
        return not (names & {"all", "ib"} or {"rc", "dc", "gga"} <= names)
    return any(name in ("all", "ib") or name.startswith(("rc", "dc", "gga")) for name in names)


class Endpoint:
    """A peer: its worker address and, once used, UCX's endpoint and unpacked remote keys."""

    def __init__(self, name: str, address: bytes, regions: list[Region]) -> None:
        self.name = name
        self.address = address
        self.regions = regions
        self.handle: int | None = None
        self.accesses_host = self.accesses_device = False
        """Whether the peer's memory is read and written without its processor."""
        self.rkeys: list[int | None] = [None] * len(regions)
        self.error = ""
        self.num_operations = 0
        """Under way: while there are some, the remote keys are in use."""
        self.close_request: int | None = None


class Endpoints:
    """Of one worker after the other; all methods belong to the progress thread."""

    def __init__(self, ucp: Any) -> None:
        self._ucp = ucp
        self._peers: dict[str, Endpoint] = {}
        self._by_handle: dict[int, Endpoint] = {}
        self._closing: list[Endpoint] = []
        self._on_error = libucp.ErrorCallback(self._failed)  # kept: UCX holds the pointer

    @property
    def all_closed(self) -> bool:
        return not self._closing

    def replace_peer(self, name: str, endpoint: Endpoint | None) -> None:
        old = self._peers.pop(name, None)
        if old is not None and not old.error:
            old.error = f"agent {name} was removed"
        if endpoint is not None:
            self._peers[name] = endpoint

    def get_peer(self, worker: UCXWorker, name: str) -> Endpoint | None:
        """Connected now, unless its `error` says why not."""
        endpoint = self._peers.get(name)
        if endpoint is not None and endpoint.handle is None and not endpoint.error:
            self._connect(worker, endpoint)
        return endpoint

    def fail_all(self, reason: str) -> None:
        for endpoint in [*self._peers.values(), *self._by_handle.values()]:
            endpoint.error = endpoint.error or reason
        self._peers.clear()

    def forget_all(self) -> None:
        """The worker is gone."""
        self._by_handle.clear()
        self._closing.clear()

    def close_failed(self) -> bool:
        """One round; true if anything moved."""
        moved = False
        for endpoint in list(self._by_handle.values()):
            if endpoint.error and endpoint.close_request is None:
                self._close(endpoint)
                moved = True
        for endpoint in list(self._closing):
            moved |= self._finish_close(endpoint)
        return moved

    def _connect(self, worker: UCXWorker, endpoint: Endpoint) -> None:
        address = c.create_string_buffer(endpoint.address, len(endpoint.address))
        params = libucp.EpParams(
            field_mask=libucp.EP_REMOTE_ADDRESS | libucp.EP_ERR_HANDLING_MODE | libucp.EP_ERR_HANDLER,
            address=c.addressof(address),
            err_mode=libucp.ERR_HANDLING_PEER,
            err_handler_cb=self._on_error,
        )
        handle = c.c_void_p()
        status = self._ucp.ucp_ep_create(worker.handle, c.byref(params), c.byref(handle))
        if status != libucp.OK:
            endpoint.error = f"no connection to {endpoint.name}: {libucp.status_text(status)}"
            return
        assert handle.value is not None
        endpoint.handle = handle.value
        self._by_handle[handle.value] = endpoint
        transports = self._query_transports(handle)
        endpoint.accesses_host = any(name.startswith(NETWORK_ACCESS) for name in transports)
        endpoint.accesses_device = any(name.startswith(_DEVICE_ACCESS) for name in transports)
        for index, region in enumerate(endpoint.regions):
            rkey = c.c_void_p()
            status = self._ucp.ucp_ep_rkey_unpack(handle, region.key, c.byref(rkey))
            if status != libucp.OK:
                endpoint.error = f"memory of {endpoint.name} cannot be reached: {libucp.status_text(status)}"
                return
            endpoint.rkeys[index] = rkey.value

    def _query_transports(self, handle: c.c_void_p) -> list[str]:
        entries = (libucp.TransportEntry * _MAX_TRANSPORTS)()
        attributes = libucp.EpAttr(field_mask=libucp.EP_ATTR_TRANSPORTS)
        attributes.transports.entries = c.cast(entries, c.c_void_p)
        attributes.transports.num_entries = len(entries)
        attributes.transports.entry_size = c.sizeof(libucp.TransportEntry)
        libucp.check(self._ucp.ucp_ep_query(handle, c.byref(attributes)), "ucp_ep_query")
        return [entries[index].transport_name.decode() for index in range(attributes.transports.num_entries)]

    def _close(self, endpoint: Endpoint) -> None:
        params = libucp.RequestParam(op_attr_mask=libucp.OP_ATTR_FLAGS, flags=libucp.EP_CLOSE_FORCE)
        pointer = self._ucp.ucp_ep_close_nbx(endpoint.handle, c.byref(params))
        endpoint.close_request = pointer if libucp.pointer_status(pointer) == libucp.INPROGRESS else 0
        self._closing.append(endpoint)

    def _finish_close(self, endpoint: Endpoint) -> bool:
        """Remote keys are destroyed once the endpoint and every operation that used them ended."""
        if endpoint.close_request:
            if self._ucp.ucp_request_check_status(endpoint.close_request) == libucp.INPROGRESS:
                return False
            self._ucp.ucp_request_free(endpoint.close_request)
            endpoint.close_request = 0
        if endpoint.num_operations:
            return False
        for rkey in endpoint.rkeys:
            if rkey is not None:
                self._ucp.ucp_rkey_destroy(rkey)
        assert endpoint.handle is not None
        if self._by_handle.get(endpoint.handle) is endpoint:  # UCX may have given the handle to a new endpoint already
            del self._by_handle[endpoint.handle]
        self._closing.remove(endpoint)
        return True

    def _failed(self, _arg: int, handle: int, status: int) -> None:
        """UCX's error callback, inside ucp_worker_progress: only notes the fact, closing happens outside."""
        endpoint = self._by_handle.get(handle)
        if endpoint is not None and not endpoint.error:
            endpoint.error = f"connection to {endpoint.name} lost: {libucp.status_text(status)}"
