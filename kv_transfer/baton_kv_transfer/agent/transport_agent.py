"""An agent over Baton's transports.

The agent keeps the names of peers, the regions and the handles. Each transfer uses the first
transport that reaches the peer and moves memory of the transfer's type.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.agent.agent import (
    INIT_AGENT,
    Agent,
    DlistHandle,
    KnownPeer,
    RegDescs,
    XferHandle,
    select_pairs,
    unknown_peer_error,
)
from baton_kv_transfer.agent.descriptors import (
    XferDescs,
    check_mem_type,
    check_pairs,
    check_regions,
    locate,
    may_merge,
    merge,
)
from baton_kv_transfer.transports.transfer import Descriptors, Region, Transfer, TransportError
from baton_kv_transfer.transports.transport import Transport, TransportContext
from baton_kv_transfer.transports.transport_selection import choose_transports
from baton_kv_transfer.transports.transport_thread import TransportThread

_METADATA_VERSION = 4
_DIGEST_BYTES = 8
#: Limit of a peer's regions. The time to locate descriptors grows with the number of regions.
MAX_REGIONS = 64


class AgentMetadata(msgspec.Struct, array_like=True):
    version: int
    name: str
    transport: str
    address: bytes
    #: (address, length, memory type, device id) of each registered region.
    regions: list[tuple[int, int, str, int]]


class _Dlist(DlistHandle):
    def __init__(
        self, agent: str, descs: XferDescs, regions: NDArray[np.int64], peer: KnownPeer | None
    ) -> None:
        super().__init__(agent, descs, peer)
        self.regions = regions  # [n]: index of the region that contains each row


class _Xfer(XferHandle):
    def __init__(
        self,
        op: str,
        peer: str,
        known_peer: KnownPeer | None,
        rows: tuple[Descriptors, Descriptors],
        mem_types: tuple[str, str],
        notif: bytes,
    ) -> None:
        super().__init__(peer, known_peer, len(rows[0]), notif)
        self.op = op
        self.local, self.remote = rows
        self.mem_type = "VRAM" if "VRAM" in mem_types else "DRAM"


class TransportAgent(Agent):
    """An agent that moves bytes by one or more transports. The transports share a thread."""

    def __init__(self, name: str, transport: str, host: str = "") -> None:
        """Start the transports and their thread.

        Args:
            name: the name under which peers know the agent.
            transport: see create_agent.
            host: see create_agent.

        Raises:
            ValueError: the transport is unknown.
            OSError: `host` is not an address of this machine.
            UCXError: UCX is missing or cannot start.
        """
        super().__init__(name)
        self._transport_name = transport
        self._thread = TransportThread(f"kv-{name}")
        self._contexts: dict[str, TransportContext] = {}
        self._transports: dict[str, Transport] = {}
        host = host or os.environ.get("POD_IP") or "127.0.0.1"
        try:
            for kind, transport_class in choose_transports(transport).items():
                self._contexts[kind] = TransportContext(
                    self._thread, name, host, self._deliver, self._wake
                )
                self._transports[kind] = transport_class(self._contexts[kind])
        except BaseException:
            self._thread.close()
            raise
        self._thread.start(lambda: [each.close() for each in self._transports.values()])
        #: Guards the regions, the peers and the address of this agent.
        self._lock = threading.RLock()
        self._regions: list[Region] = []
        self._peers: dict[str, KnownPeer] = {}
        self._own_address = b""
        self._closed = False
        self._closing = threading.Lock()

    @property
    def num_refused(self) -> int:
        return sum(context.num_refused for context in self._contexts.values())

    @property
    def failure(self) -> str:
        failures = [self._thread.failure, *(each.failure for each in self._contexts.values())]
        return "; ".join(filter(None, failures))

    @property
    def bytes_moved(self) -> dict[str, int]:
        return {
            f"{kind} {mechanism}": nbytes
            for kind, context in self._contexts.items()
            for mechanism, nbytes in context.bytes_moved.copy().items()
        }

    def waiting(self) -> AbstractContextManager[int | None]:
        return self._thread.waiting()

    def register_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str = "DRAM"
    ) -> RegDescs:
        check_mem_type(mem_type)
        kinds = [
            kind for kind, transport in self._transports.items() if mem_type in transport.mem_types
        ]
        if not kinds:
            raise ValueError(
                f"{' and '.join(self._transports)} cannot move {mem_type} here: GPU memory needs "
                "transport ucx, nixl or auto, an NVIDIA driver, and a UCX with CUDA (cuda_copy in "
                "UCX_TLS if that is set)"
            )
        check_regions(reg_list, self.name)
        regions = [
            Region(address, length, mem_type, device_id)
            for address, length, device_id, _ in reg_list
        ]
        self._thread.commands.call(lambda: self._add_regions(regions, kinds))
        with self._lock:
            self._regions += regions
        return RegDescs(regions)

    def deregister_memory(self, dereg_list: RegDescs) -> None:
        with self._lock:
            for region in dereg_list.regions:
                self._regions.remove(region)
            # Descriptor lists for this agent as a peer have region indices, which are wrong now.
            self._peers.pop(self.name, None)
        self._thread.commands.call(lambda: self._forget_regions(dereg_list.regions))

    def get_agent_metadata(self) -> bytes:
        with self._lock:
            regions = [(r.address, r.length, r.mem_type, r.device_id) for r in self._regions]
            address = self._address()
        packed = msgspec.msgpack.encode(
            AgentMetadata(_METADATA_VERSION, self.name, self._transport_name, address, regions)
        )
        return seal(packed)

    def add_remote_agent(self, metadata: bytes) -> str:
        digest, packed = metadata[:_DIGEST_BYTES], metadata[_DIGEST_BYTES:]
        if _digest(packed) != digest:
            raise ValueError(
                f"agent metadata of {len(metadata)} bytes is damaged, or not of an agent over "
                f"{self._transport_name}: fetch it again from its agent"
            )
        try:
            version, _, transport, *_ = msgspec.msgpack.decode(
                packed, type=tuple[int, str, str, bytes, list[object]]
            )
            if (version, transport) != (_METADATA_VERSION, self._transport_name):
                raise ValueError(
                    f"the peer has metadata version {version} over {transport}, this agent has "
                    f"version {_METADATA_VERSION} over {self._transport_name}: both sides must run "
                    "the same release and transport"
                )
            decoded = msgspec.msgpack.decode(packed, type=AgentMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"malformed agent metadata: {error}") from error
        if len(decoded.regions) > MAX_REGIONS:
            raise ValueError(
                f"agent {decoded.name} has {len(decoded.regions)} regions, "
                f"the limit is {MAX_REGIONS}"
            )
        check_regions(decoded.regions, decoded.name)
        regions = [Region(*region) for region in decoded.regions]
        if decoded.name == self.name:
            raise ValueError(
                f"the metadata is of an agent called {self.name}, which is this agent's own name"
            )
        with self._lock:
            known = self._peers.get(decoded.name)
            if known is None or known.metadata != metadata:
                self._peers.pop(decoded.name, None)
                self._add_peer(decoded.name, decoded.address)
                self._peers[decoded.name] = KnownPeer(metadata, regions)
        return decoded.name

    def remove_remote_agent(self, agent: str) -> None:
        with self._lock:
            if self._peers.pop(agent, None) is not None:
                for transport in self._transports.values():
                    transport.remove_peer(agent)

    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Sequence[tuple[int, int, int]] | Descriptors | XferDescs,
        mem_type: str = "DRAM",
    ) -> DlistHandle:
        descs = self.get_xfer_descs(xfer_list, mem_type)
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
        assert isinstance(local_xfer_side, _Dlist)
        assert isinstance(remote_xfer_side, _Dlist)
        ours, theirs = (
            np.asarray(local_indices, dtype=np.int64),
            np.asarray(remote_indices, dtype=np.int64),
        )
        rows = select_pairs(operation, local_xfer_side, ours, remote_xfer_side, theirs)
        if may_merge(*rows):
            rows = merge(
                *rows, local_xfer_side.regions.take(ours), remote_xfer_side.regions.take(theirs)
            )
        return _Xfer(
            operation,
            remote_xfer_side.agent,
            remote_xfer_side.known_peer,
            rows,
            (local_xfer_side.descs.mem_type, remote_xfer_side.descs.mem_type),
            notif_msg,
        )

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
        locate(remote_descs, peer.regions, remote_agent)
        return _Xfer(
            operation,
            remote_agent,
            peer,
            (local_descs.rows, remote_descs.rows),
            (local_descs.mem_type, remote_descs.mem_type),
            notif_msg,
        )

    def transfer(self, handle: XferHandle, notif_msg: bytes = b"") -> str:
        assert isinstance(handle, _Xfer)
        with self._lock:
            handle.check_post()
            self._require_open()
            transfer = Transfer(
                handle.op, handle.peer, handle.local, handle.remote, notif_msg or handle.notif
            )
            handle.post = transfer
            peer = self._peers.get(handle.peer)
            if peer is None or peer is not handle.known_peer:
                transfer.end(
                    f"agent {handle.peer} was removed or replaced: make the transfer again"
                )
            else:
                try:
                    self._begin(transfer, handle.mem_type)
                except TransportError as error:  # the thread failed
                    transfer.end(str(error))
        return transfer.state.value

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        self._peer(remote_agent_name)
        if not any(
            transport.send_notif(remote_agent_name, notif_msg)
            for transport in self._transports.values()
        ):
            raise TransportError(
                f"agent {remote_agent_name} is gone or cannot be reached: add_remote_agent again"
            )

    def fence(self) -> None:
        with self._lock:
            self._require_open()
            self._peers.clear()
            self._thread.commands.call(
                lambda: [transport.fence() for transport in self._transports.values()]
            )

    def close(self) -> None:
        with self._closing:  # a second caller waits for the first
            if not self._closed:
                self._closed = True
                self._thread.close()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("the agent is closed")

    def _peer(self, name: str) -> KnownPeer:
        with self._lock:
            if name == self.name:
                self._add_own()
            try:
                return self._peers[name]
            except KeyError:
                raise unknown_peer_error(name) from None

    def _add_own(self) -> None:
        """Add this agent as a peer of itself, or update its address if the address has changed."""
        address = self._address()
        if self.name not in self._peers:
            self._peers[self.name] = KnownPeer(regions=self._regions)
        elif address == self._own_address:
            return
        self._own_address = address
        self._add_peer(self.name, address)

    def _address(self) -> bytes:
        return msgspec.msgpack.encode(
            {kind: transport.address for kind, transport in self._transports.items()}
        )

    def _add_peer(self, name: str, address: bytes) -> None:
        """Add a peer to each transport for which `address` has an entry.

        Raises:
            ValueError: the address is invalid.
        """
        try:
            addresses = msgspec.msgpack.decode(address, type=dict[str, bytes])
            for kind, transport in self._transports.items():
                if kind in addresses:
                    transport.add_peer(name, addresses[kind])
        except msgspec.DecodeError as error:
            raise ValueError(
                f"agent {name} has an address that this release cannot decode: {error}"
            ) from error

    def _begin(self, transfer: Transfer, mem_type: str) -> None:
        """Begin a transfer on the first transport that moves `mem_type` and reaches the peer.

        Without such a transport, the transfer ends in ERR.
        """
        if not any(
            mem_type in transport.mem_types and transport.begin(transfer)
            for transport in self._transports.values()
        ):
            transfer.end(
                f"{transfer.op} of {transfer.peer}'s memory ({mem_type}): no transport of "
                f"{', '.join(self._transports)} reaches it from {self.name}: both sides need a "
                "common transport"
            )
            self._wake()

    def _deliver(self, sender: str, message: bytes) -> None:
        self._notifs.append((sender, message))
        self._wake()

    def _wake(self) -> None:
        if self._thread.on_event():
            self._wakeup()

    # Called by the transports' thread

    def _add_regions(self, regions: list[Region], kinds: list[str]) -> None:
        for kind in kinds:
            self._contexts[kind].regions += regions

    def _forget_regions(self, regions: list[Region]) -> None:
        for kind, context in self._contexts.items():
            for region in [region for region in regions if region in context.regions]:
                context.regions.remove(region)
                self._transports[kind].forget_region(region)


def seal(packed: bytes) -> bytes:
    """Return a digest of `packed`, followed by `packed`. The receiver checks the digest."""
    return _digest(packed) + packed


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES, person=b"baton-agent").digest()
