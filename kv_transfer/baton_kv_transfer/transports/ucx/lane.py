"""The lane over UCX, for any thread: what peers and transfers there are is passed on to the thread that owns UCX's worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from baton_kv_transfer.transports.base import Region, TransportError
from baton_kv_transfer.transports.lane_thread import LaneThread
from baton_kv_transfer.transports.lanes import Lane
from baton_kv_transfer.transports.transfer import Transfer
from baton_kv_transfer.transports.ucx.connections import Connections, PeerAddress
from baton_kv_transfer.transports.ucx.worker import UCXContext


class UCXLane(Lane):
    def __init__(
        self,
        thread: LaneThread,
        name: str,
        host: str,
        deliver: Callable[[str, bytes], None],
        wakeup: Callable[[], None],
    ) -> None:
        """See Lane.

        Raises:
            OSError: `host` is no address of this machine.
            UCXError: UCX is missing or does not start.
        """
        context = UCXContext(host)
        self.mem_types = ("DRAM", "VRAM") if context.has_cuda else ("DRAM",)
        self._thread = thread
        self._peers: dict[str, PeerAddress] = {}
        self._connections = Connections(thread, context, name, deliver, wakeup)
        thread.progress_also(self._connections.progress)

    @property
    def num_refused(self) -> int:
        return self._connections.num_refused

    @property
    def bytes_moved(self) -> dict[str, int]:
        return {f"ucx {lanes}": nbytes for lanes, nbytes in self._connections.moved.copy().items()}

    def address(self) -> bytes:
        return self._connections.address

    def register(self, region: Region) -> None:
        self._thread.mailbox.call(lambda: self._connections.regions.append(region))

    def deregister(self, region: Region) -> None:
        self._thread.mailbox.call(lambda: self._connections.forget_region(region))

    def add_peer(self, name: str, address: bytes) -> None:
        self.remove_peer(name)
        self._peers[name] = msgspec.msgpack.decode(address, type=PeerAddress)

    def remove_peer(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            with contextlib.suppress(TransportError):  # closed: all are disconnected
                self._thread.mailbox.submit(lambda: self._connections.disconnect(peer, f"agent {name} was removed"))

    def begin(self, transfer: Transfer) -> bool:
        peer = self._peers.get(transfer.peer)
        if peer is not None:
            self._thread.mailbox.submit(lambda: self._connections.begin(peer, transfer))
        return peer is not None

    def send_notif(self, name: str, message: bytes) -> bool:
        peer = self._peers.get(name)
        if peer is not None:
            self._thread.mailbox.submit(lambda: self._connections.notify(peer, name, message))
        return peer is not None

    def fence(self) -> None:
        self._peers.clear()
        self._thread.mailbox.call(self._connections.fence)

    def end(self) -> None:
        self._connections.end()
