"""The agent over one of our transports: it knows names, regions and handles; the transport moves bytes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.agent import (
    INIT_AGENT,
    Agent,
    DlistHandle,
    RegDescs,
    XferHandle,
    check_post,
    check_sides,
    unknown_peer,
)
from baton_kv_transfer.descriptors import XferDescs, check_mem_type, check_pairs, locate, may_merge, merge, select
from baton_kv_transfer.transports import create_transport
from baton_kv_transfer.transports.base import Descriptors, Operation, Region, TransportError, XferState

_METADATA_VERSION = 4
_DIGEST_BYTES = 8


class AgentMetadata(msgspec.Struct, array_like=True):
    version: int
    name: str
    transport: str
    address: bytes
    regions: list[tuple[int, int, str, int]]
    """(address, length, memory type, device id) of each registered region."""


class _Peer:
    """What is known of a peer by one metadata; handles hold on to it and so notice that it was replaced."""

    def __init__(self, regions: list[Region], digest: bytes = b"") -> None:
        self.regions = regions
        self.digest = digest


class _RegDescs(RegDescs):
    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions


class _Dlist(DlistHandle):
    def __init__(self, agent: str, descs: XferDescs, regions: NDArray[np.int64], peer: _Peer | None) -> None:
        super().__init__(agent, descs)
        self.regions = regions  # [n], index of the region that holds each row
        self.known_peer = peer


class _Xfer(XferHandle):
    def __init__(
        self,
        op: str,
        peer: str,
        known_peer: _Peer | None,
        rows: tuple[Descriptors, Descriptors, NDArray[np.int64]],
        notif: bytes,
    ) -> None:
        self.op = op
        self.peer = peer
        self.known_peer = known_peer
        self.local, self.remote, self.regions = rows
        self.notif = notif
        self.num_descs = len(self.local)
        self.operation: Operation | None = None

    @property
    def state(self) -> XferState | None:
        return self.operation.state if self.operation else None

    @property
    def error(self) -> str:
        return self.operation.error if self.operation else ""


class _NotPosted(Operation):
    """A post that failed at once."""

    def __init__(self, error: str) -> None:
        self.error = error

    @property
    def state(self) -> XferState:
        return XferState.ERR


class TransportAgent(Agent):
    def __init__(self, name: str, transport: str, host: str = "") -> None:
        """
        Args:
            host: see create_agent.

        Raises:
            ValueError: unknown transport.
            OSError: `host` is no address of this machine.
            UCXError: UCX is missing or does not start.
        """
        self.name = name
        self._transport_name = transport
        self._transport = create_transport(transport, name, host)
        self._lock = threading.RLock()  # of the two below
        self._regions: list[Region] = []
        self._peers: dict[str, _Peer] = {}
        self._closed = False
        self._closing = threading.Lock()

    @property
    def num_refused(self) -> int:
        return self._transport.num_refused

    @property
    def bytes_moved(self) -> dict[str, int]:
        return self._transport.bytes_moved

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._transport.set_wakeup(wakeup)

    def waiting(self) -> AbstractContextManager[int | None]:
        return self._transport.waiting()

    def register_memory(self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str = "DRAM") -> RegDescs:
        check_mem_type(mem_type)
        regions = []
        for address, length, device_id, _ in reg_list:
            regions.append(self._transport.register(address, length, mem_type, device_id))
        with self._lock:
            self._regions += regions
            self._peers.pop(self.name, None)  # as it was
        return _RegDescs(regions)

    def deregister_memory(self, dereg_list: RegDescs) -> None:
        assert isinstance(dereg_list, _RegDescs)
        for region in dereg_list.regions:
            with self._lock:
                self._regions.remove(region)
                self._peers.pop(self.name, None)
            self._transport.deregister(region)

    def get_agent_metadata(self) -> bytes:
        with self._lock:
            regions = [(r.address, r.length, r.mem_type, r.device_id) for r in self._regions]
            address = self._transport.address()
        packed = msgspec.msgpack.encode(
            AgentMetadata(_METADATA_VERSION, self.name, self._transport_name, address, regions)
        )
        return _digest(packed) + packed

    def add_remote_agent(self, metadata: bytes) -> str:
        digest, packed = metadata[:_DIGEST_BYTES], metadata[_DIGEST_BYTES:]
        if _digest(packed) != digest:
            raise ValueError(
                f"agent metadata of {len(metadata)} bytes is damaged, or not of an agent over {self._transport_name}: "
                f"fetch it again from its agent"
            )
        try:
            version, _, transport, *_ = msgspec.msgpack.decode(packed, type=tuple[int, str, str, bytes, list[object]])
            if (version, transport) != (_METADATA_VERSION, self._transport_name):
                raise ValueError(
                    f"an agent speaks metadata version {version} over {transport}, "
                    f"this one version {_METADATA_VERSION} over {self._transport_name}: run the same release and transport"
                )
            decoded = msgspec.msgpack.decode(packed, type=AgentMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"malformed agent metadata: {error}") from error
        regions = [Region(*region) for region in decoded.regions]
        if not all(0 <= region.address < region.address + region.length < 2**63 for region in regions):
            raise ValueError(f"agent {decoded.name} claims memory at addresses that cannot be")
        if decoded.name == self.name:
            raise ValueError(f"metadata of an agent called {self.name}, as this one is, which knows itself")
        with self._lock:
            known = self._peers.get(decoded.name)
            if known is None or known.digest != digest:
                self._peers[decoded.name] = _Peer(regions, digest)
                self._transport.add_peer(decoded.name, decoded.address, regions)
        return decoded.name

    def remove_remote_agent(self, agent: str) -> None:
        with self._lock:
            if self._peers.pop(agent, None) is not None:
                self._transport.remove_peer(agent)

    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Sequence[tuple[int, int, int]] | Descriptors | XferDescs,
        mem_type: str = "DRAM",
    ) -> DlistHandle:
        descs = xfer_list if isinstance(xfer_list, XferDescs) else self.get_xfer_descs(xfer_list, mem_type)
        if agent_name in ("", INIT_AGENT):
            return _Dlist("", descs, locate(descs, self._regions, INIT_AGENT), None)
        peer = self._peer(agent_name)
        return _Dlist(agent_name, descs, locate(descs, peer.regions, agent_name), peer)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: DlistHandle,
        local_indices: Sequence[int] | NDArray[np.int64],
        remote_xfer_side: DlistHandle,
        remote_indices: Sequence[int] | NDArray[np.int64],
        notif_msg: bytes = b"",
    ) -> XferHandle:
        check_sides(local_xfer_side, remote_xfer_side)
        assert isinstance(local_xfer_side, _Dlist)
        assert isinstance(remote_xfer_side, _Dlist)
        ours, theirs = np.asarray(local_indices, dtype=np.int64), np.asarray(remote_indices, dtype=np.int64)
        local, remote = select(local_xfer_side.descs.rows, ours), select(remote_xfer_side.descs.rows, theirs)
        check_pairs(operation, local, remote)
        if may_merge(local, remote):
            merged = merge(local, local_xfer_side.regions.take(ours), remote, remote_xfer_side.regions.take(theirs))
        else:
            merged = local, remote, remote_xfer_side.regions.take(theirs)
        return _Xfer(operation, remote_xfer_side.agent, remote_xfer_side.known_peer, merged, notif_msg)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: XferDescs,
        remote_descs: XferDescs,
        remote_agent: str,
        notif_msg: bytes = b"",
    ) -> XferHandle:
        check_pairs(operation, local_descs.rows, remote_descs.rows)
        locate(local_descs, self._regions, INIT_AGENT)
        peer = self._peer(remote_agent)
        rows = (local_descs.rows, remote_descs.rows, locate(remote_descs, peer.regions, remote_agent))
        return _Xfer(operation, remote_agent, peer, rows, notif_msg)

    def transfer(self, handle: XferHandle, notif_msg: bytes = b"") -> str:
        assert isinstance(handle, _Xfer)
        with self._lock:
            check_post(handle)
            self._require_open()
            if self._peers.get(handle.peer) is handle.known_peer:
                notif = notif_msg or handle.notif
                handle.operation = self._transport.post(
                    handle.op, handle.peer, handle.local, handle.remote, handle.regions, notif
                )
            else:
                handle.operation = _NotPosted(f"agent {handle.peer} was removed or replaced: make the transfer again")
        return handle.operation.state.value

    def check_xfer_state(self, handle: XferHandle) -> str:
        if handle.state is None:
            raise ValueError("the transfer was not posted: call transfer first")
        return handle.state.value

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notifs: dict[str, list[bytes]] = {}
        for sender, message in self._transport.take_notifs():
            notifs.setdefault(sender, []).append(message)
        return notifs

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        self._peer(remote_agent_name)
        self._transport.send_notif(remote_agent_name, notif_msg)

    def fence(self) -> None:
        with self._lock:
            self._require_open()
            self._peers.clear()
            self._transport.fence()

    def close(self) -> None:
        with self._closing:  # who comes second waits until it is done
            if not self._closed:
                self._closed = True
                self._transport.close()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("the agent is closed")

    def _peer(self, name: str) -> _Peer:
        with self._lock:
            if name == self.name and name not in self._peers:
                self._peers[name] = _Peer(list(self._regions))
                self._transport.add_peer(name, self._transport.address(), self._peers[name].regions)
            try:
                return self._peers[name]
            except KeyError:
                raise unknown_peer(name) from None


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES, person=b"baton-agent").digest()
