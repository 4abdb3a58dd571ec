"""The transport `ucx`: bytes between processes, each batch the best way that both sides have.

    same_host   host memory of processes of one host, if UCX_TLS allows such transports
    UCX         memory of devices, and host memory where the network accesses it (rc, dc, gga)
    tcp_lane    host memory everywhere else, and all notifications that are not of one host

UCX moves by one-sided gets and puts only. It runs with peer error handling, so that a peer's death ends operations instead of
the process, and in that mode has no shared memory; its emulation over tcp would be slower than a socket, trusts its peers, and
connects while it waits. It is started only where it has something to move.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports import ucx_endpoints
from baton_kv_transfer.transports.base import Descriptors, Operation, Region, Transport, TransportError
from baton_kv_transfer.transports.lane_protocol import permitted
from baton_kv_transfer.transports.lane_thread import LaneThread
from baton_kv_transfer.transports.same_host import SameHostLane
from baton_kv_transfer.transports.tcp_lane import TCPLane
from baton_kv_transfer.transports.transfer import Transfer
from baton_kv_transfer.transports.ucx_progress import ProgressThread


class _Address(msgspec.Struct, array_like=True):
    tcp: bytes
    same_host: bytes
    """Empty: not that way."""
    worker: bytes
    """Empty: not over UCX."""


class UCXTransport(Transport):
    def __init__(self, name: str, host: str = "") -> None:
        """
        Args:
            host: address to listen at, and to be reached at; empty: $POD_IP, or else 127.0.0.1.

        Raises:
            OSError: `host` is no address of this machine.
            UCXError: UCX is missing or does not start, on a machine whose network accesses memory.
        """
        self._name = name
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None
        self._vram: list[Region] = []
        self._peers: dict[str, tuple[bytes, list[Region]]] = {}
        """UCX's address and regions of each peer that UCX reaches."""
        self._device_regions: dict[str, list[int]] = {}
        self._ucx_lock = threading.RLock()
        self._ucx: ProgressThread | None = None
        tls = os.environ.get("UCX_TLS")
        self._moves_host_memory = ucx_endpoints.has_network_access(tls)
        self._lanes = LaneThread(f"lanes-{name}")
        try:
            host = host or os.environ.get("POD_IP") or "127.0.0.1"
            self._tcp = TCPLane(self._lanes, name, host, self._deliver, self._wake)
        except OSError:
            self._lanes.close()
            raise
        self._same_host = SameHostLane(self._lanes, name, self._deliver, self._wake) if permitted(tls) else None
        self._lanes.start(self._end_lanes)
        if self._moves_host_memory:
            try:
                self._start_ucx()
            except BaseException:
                self.close()
                raise

    @property
    def num_refused(self) -> int:  # type: ignore[override]
        return self._tcp.num_refused + (self._same_host.num_refused if self._same_host else 0)

    def address(self) -> bytes:
        same_host = self._same_host.address() if self._same_host else b""
        return msgspec.msgpack.encode(_Address(self._tcp.address(), same_host, self._ucx.address if self._ucx else b""))

    def register(self, address: int, length: int, mem_type: str = "DRAM", device_id: int = 0) -> Region:
        if mem_type != "DRAM":
            region = self._start_ucx().register(address, length, mem_type, device_id)
            self._vram.append(region)
            return region
        if self._moves_host_memory:
            region = self._start_ucx().register(address, length, mem_type, device_id)
        else:
            region = Region(address, length, device_id=device_id)
        self._tcp.register(region)
        if self._same_host:
            self._same_host.register(region)
        return region

    def deregister(self, region: Region) -> None:
        if region.mem_type == "DRAM":
            self._tcp.deregister(region)
            if self._same_host:
                self._same_host.deregister(region)
        else:
            self._vram.remove(region)
        if self._ucx and region.key:
            self._ucx.deregister(region)

    def add_peer(self, name: str, address: bytes, regions: list[Region]) -> None:
        try:
            decoded = msgspec.msgpack.decode(address, type=_Address)
            self._tcp.add_peer(name, decoded.tcp)
        except msgspec.DecodeError as error:
            raise ValueError(f"agent {name} has no address that this release understands: {error}") from error
        self._device_regions[name] = [index for index, region in enumerate(regions) if region.mem_type != "DRAM"]
        if self._same_host:
            self._same_host.add_peer(name, decoded.same_host, regions)
        with self._ucx_lock:
            self._peers.pop(name, None)
            if decoded.worker:
                self._peers[name] = (decoded.worker, regions)
            if self._ucx and decoded.worker:
                self._ucx.add_peer(name, decoded.worker, regions)
            elif self._ucx:
                self._ucx.remove_peer(name)

    def remove_peer(self, name: str) -> None:
        self._device_regions.pop(name, None)
        self._tcp.remove_peer(name)
        if self._same_host:
            self._same_host.remove_peer(name)
        with self._ucx_lock:
            self._peers.pop(name, None)
            if self._ucx:
                self._ucx.remove_peer(name)

    def fence(self) -> None:
        self._tcp.fence()
        if self._same_host:
            self._same_host.fence()
        with self._ucx_lock:
            self._peers.clear()
            if self._ucx:
                self._ucx.fence()

    def post(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> Operation:
        transfer = Transfer(op, peer, local, remote, regions, notif)
        on_device = self._is_vram(local)
        if self._same_host and not on_device and self._same_host.begin(transfer):
            return transfer
        theirs = self._device_regions.get(peer)
        device = on_device or bool(theirs and np.isin(regions, theirs).any())
        if self._ucx and peer in self._peers and (device or self._moves_host_memory):
            self._ucx.begin(transfer, device)
        elif device:
            transfer.end(
                f"device memory: {self._name} and {peer} do not both have UCX for it; move it through host memory"
            )
            self._wakeup()
        else:
            self._tcp.begin(transfer)
        return transfer

    def send_notif(self, peer: str, message: bytes) -> None:
        if not (self._same_host and self._same_host.send_notif(peer, message)):
            self._tcp.send_notif(peer, message)

    def take_notifs(self) -> list[tuple[str, bytes]]:
        return [self._notifs.popleft() for _ in range(len(self._notifs))]

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup

    def waiting(self) -> AbstractContextManager[int | None]:
        return self._lanes.waiting()

    def close(self) -> None:
        if self._ucx:
            self._ucx.close()
        self._lanes.close()

    def _end_lanes(self) -> None:
        if self._same_host:
            self._same_host.end()
        self._tcp.end()

    def _start_ucx(self) -> ProgressThread:
        with self._ucx_lock:
            if self._ucx is None:
                self._ucx = ProgressThread(self._name, self._tcp.begin, self._notify, self._wake)
                for name, (address, regions) in self._peers.items():
                    self._ucx.add_peer(name, address, regions)
            return self._ucx

    def _is_vram(self, local: Descriptors) -> bool:
        """The rows of one list are of one memory type."""
        if not self._vram:
            return False
        address = int(local[0, 0])
        return any(region.address <= address < region.address + region.length for region in self._vram)

    def _notify(self, peer: str, message: bytes) -> None:
        """After a transfer over UCX; its peer may have been removed meanwhile."""
        with contextlib.suppress(TransportError):
            self.send_notif(peer, message)

    def _deliver(self, sender: str, message: bytes) -> None:
        self._notifs.append((sender, message))
        self._wake()

    def _wake(self) -> None:
        if self._lanes.on_news():
            self._wakeup()
