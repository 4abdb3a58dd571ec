"""The transfer agent: registered memory, peers by name, one-sided transfers with notifications. NIXL's names and semantics.

    one active post per handle, posted again only after DONE or ERR; no order among transfers; a transfer's notification
    arrives after all its descriptors; adding a peer's metadata does not connect; removing a peer disconnects;
    `make_prepped_xfer` merges runs that are adjacent on both sides, `initialize_xfer` does not.

Host memory ("DRAM") only. Every descriptor is checked against registered memory, the peer's against its metadata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.transports import create_transport
from baton_kv_transfer.transports.base import Descriptors, Operation, Region, TransportError, XferState

INIT_AGENT = "NIXL_INIT_AGENT"
"""Agent name of the local side in prep_xfer_dlist."""
_METADATA_VERSION = 1
_DIGEST_BYTES = 8


class AgentMetadata(msgspec.Struct, array_like=True):
    version: int
    name: str
    transport: str
    address: bytes
    regions: list[tuple[int, int, bytes]]
    """(address, length, key) of each registered region."""


class RegDescs:
    """Registered memory, as register_memory returned it."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions


class DlistHandle:
    """A checked descriptor list, local or of one peer."""

    def __init__(self, agent: str, descs: Descriptors, regions: NDArray[np.int64]) -> None:
        self.agent = agent
        self.descs = descs
        self.regions = regions
        self.released = False


class XferHandle:
    """A transfer that can be posted."""

    def __init__(
        self, op: str, peer: str, local: Descriptors, remote: Descriptors, regions: NDArray[np.int64], notif: bytes
    ) -> None:
        self.op = op
        self.peer = peer
        self.local = local
        self.remote = remote
        self.regions = regions
        self.notif = notif
        self.operation: Operation | None = None
        self.released = False

    @property
    def num_descs(self) -> int:
        """Descriptors after merging."""
        return len(self.local)

    @property
    def error(self) -> str:
        """Why the state is ERR."""
        return self.operation.error if self.operation else ""


class _Peer:
    def __init__(self, metadata: AgentMetadata, digest: bytes) -> None:
        self.digest = digest
        self.regions = [Region(*region) for region in metadata.regions]


class Agent:
    """Moves bytes between registered memory here and at peers. Methods return at once, save (de)registering memory."""

    def __init__(self, name: str, transport: str = "ucx") -> None:
        """
        Raises:
            ValueError: unknown transport.
            UCXError: UCX is missing or does not start.
        """
        self.name = name
        self._transport_name = transport
        self._transport = create_transport(transport, name)
        self._regions: list[Region] = []
        self._peers: dict[str, _Peer] = {}

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called, from any thread, after a transfer ended or a notification arrived. (Not in NIXL, where one polls.)"""
        self._transport.set_wakeup(wakeup)

    def register_memory(self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str = "DRAM") -> RegDescs:
        """Makes memory usable in transfers; it must stay allocated until deregister_memory.

        Args:
            reg_list: (address, length in bytes, device id, free text) of each region.
        """
        _require_dram(mem_type)
        regions = [self._transport.register(address, length) for address, length, _, _ in reg_list]
        self._regions += regions
        return RegDescs(regions)

    def deregister_memory(self, dereg_list: RegDescs) -> None:
        for region in dereg_list.regions:
            self._regions.remove(region)
            self._transport.deregister(region)

    def get_agent_metadata(self) -> bytes:
        """What a peer needs to reach this agent's memory as registered now."""
        regions = [(region.address, region.length, region.key) for region in self._regions]
        packed = msgspec.msgpack.encode(
            AgentMetadata(_METADATA_VERSION, self.name, self._transport_name, self._transport.address(), regions)
        )
        return _digest(packed) + packed

    def add_remote_agent(self, metadata: bytes) -> str:
        """Makes a peer known and returns its name. The same metadata twice is once; newer metadata replaces the older.

        Raises:
            ValueError: damaged metadata, or of another version or transport.
        """
        digest, packed = metadata[:_DIGEST_BYTES], metadata[_DIGEST_BYTES:]
        if _digest(packed) != digest:
            raise ValueError(f"agent metadata of {len(metadata)} bytes is damaged: fetch it again from its agent")
        decoded = msgspec.msgpack.decode(packed, type=AgentMetadata)
        if (decoded.version, decoded.transport) != (_METADATA_VERSION, self._transport_name):
            raise ValueError(
                f"agent {decoded.name} speaks metadata version {decoded.version} over {decoded.transport}, "
                f"this one version {_METADATA_VERSION} over {self._transport_name}: run the same release and transport"
            )
        known = self._peers.get(decoded.name)
        if known is None or known.digest != digest:
            peer = _Peer(decoded, digest)
            self._peers[decoded.name] = peer
            self._transport.add_peer(decoded.name, decoded.address, peer.regions)
        return decoded.name

    def remove_remote_agent(self, agent: str) -> None:
        """Disconnects and forgets a peer; its transfers in flight end in ERR."""
        if self._peers.pop(agent, None) is not None:
            self._transport.remove_peer(agent)

    def get_xfer_descs(
        self, descs: Sequence[tuple[int, int, int]] | Descriptors, mem_type: str = "DRAM"
    ) -> Descriptors:
        """Descriptors from (address, length, device id) rows.

        Raises:
            ValueError: not [n, 3], or a length below 1.
        """
        _require_dram(mem_type)
        array = np.ascontiguousarray(descs, dtype=np.int64)
        if array.ndim != 2 or array.shape[1] != 3:
            raise ValueError(f"descriptors must be [n, 3] (address, length, device id), got shape {array.shape}")
        if (array[:, 1] < 1).any():
            raise ValueError("descriptors must have lengths of at least 1 byte")
        return array

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Sequence[tuple[int, int, int]] | Descriptors, mem_type: str = "DRAM"
    ) -> DlistHandle:
        """Checks descriptors once for use in many transfers.

        Args:
            agent_name: NIXL_INIT_AGENT or "" for the local side, else a peer's name.

        Raises:
            KeyError: unknown peer.
            ValueError: a descriptor is outside the memory that side registered.
        """
        descs = self.get_xfer_descs(xfer_list, mem_type)
        local = agent_name in ("", INIT_AGENT)
        regions = self._regions if local else self._peer(agent_name).regions
        return DlistHandle("" if local else agent_name, descs, _locate(descs, regions, agent_name or INIT_AGENT))

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: DlistHandle,
        local_indices: Sequence[int] | NDArray[np.int64],
        remote_xfer_side: DlistHandle,
        remote_indices: Sequence[int] | NDArray[np.int64],
        notif_msg: bytes = b"",
    ) -> XferHandle:
        """A transfer between rows of two prepared lists, pairwise; runs adjacent on both sides become one descriptor."""
        if local_xfer_side.released or remote_xfer_side.released:
            raise ValueError("a descriptor list of this transfer was released: prepare it again")
        if local_xfer_side.agent or not remote_xfer_side.agent:
            raise ValueError(f"local_xfer_side must be prepared for {INIT_AGENT}, remote_xfer_side for a peer")
        ours, theirs = np.asarray(local_indices, dtype=np.int64), np.asarray(remote_indices, dtype=np.int64)
        local, remote = local_xfer_side.descs[ours], remote_xfer_side.descs[theirs]
        _check_pairs(operation, local, remote)
        regions = remote_xfer_side.regions[theirs]
        return XferHandle(
            operation, remote_xfer_side.agent, *_merge(local, local_xfer_side.regions[ours], remote, regions), notif_msg
        )

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Descriptors,
        remote_descs: Descriptors,
        remote_agent: str,
        notif_msg: bytes = b"",
    ) -> XferHandle:
        """A transfer between two descriptor lists, pairwise.

        Raises:
            KeyError: unknown peer.
            ValueError: lists of different shape, or a descriptor outside registered memory.
        """
        _check_pairs(operation, local_descs, remote_descs)
        _locate(local_descs, self._regions, INIT_AGENT)
        regions = _locate(remote_descs, self._peer(remote_agent).regions, remote_agent)
        return XferHandle(operation, remote_agent, local_descs, remote_descs, regions, notif_msg)

    def transfer(self, handle: XferHandle, notif_msg: bytes = b"") -> str:
        """Posts a transfer: DONE, PROC or ERR.

        Raises:
            ValueError: the handle was released, or its last post has not ended.
        """
        if handle.released:
            raise ValueError("the transfer was released: make it again")
        if handle.operation is not None and handle.operation.state is XferState.PROC:
            raise ValueError("the transfer is still active: post it again after DONE or ERR")
        notif = notif_msg or handle.notif
        handle.operation = self._transport.post(
            handle.op, handle.peer, handle.local, handle.remote, handle.regions, notif
        )
        return handle.operation.state.value

    def check_xfer_state(self, handle: XferHandle) -> str:
        """DONE, PROC or ERR of the last post; after DONE and ERR local memory is not touched any more."""
        if handle.operation is None:
            raise ValueError("the transfer was not posted: call transfer first")
        return handle.operation.state.value

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Notifications since the last call, by sender."""
        notifs: dict[str, list[bytes]] = {}
        for sender, message in self._transport.take_notifs():
            notifs.setdefault(sender, []).append(message)
        return notifs

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        """Sends a notification of its own, in no order with transfers.

        Raises:
            KeyError: unknown peer.
        """
        self._peer(remote_agent_name)
        self._transport.send_notif(remote_agent_name, notif_msg)

    def release_xfer_handle(self, handle: XferHandle) -> None:
        """Forgets a transfer; does not block.

        Raises:
            TransportError: it is active, its memory still in use; remove_remote_agent aborts it.
        """
        if handle.operation is not None and handle.operation.state is XferState.PROC:
            raise TransportError("the transfer is active: wait for it, or abort it by remove_remote_agent")
        handle.released = True

    def release_dlist_handle(self, handle: DlistHandle) -> None:
        """Forgets a descriptor list; transfers made from it stay valid."""
        handle.released = True

    def close(self) -> None:
        """Ends the transport's thread and all transfers; peers see the connection go away. Idempotent."""
        self._transport.close()

    def _peer(self, name: str) -> _Peer:
        try:
            return self._peers[name]
        except KeyError:
            raise KeyError(f"agent {name} is not known: add_remote_agent(its metadata) first") from None


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES, person=b"baton-agent").digest()


def _require_dram(mem_type: str) -> None:
    if mem_type != "DRAM":
        raise ValueError(f"memory type must be DRAM, got {mem_type!r}")


def _check_pairs(operation: str, local: Descriptors, remote: Descriptors) -> None:
    if operation not in ("READ", "WRITE"):
        raise ValueError(f"operation must be READ or WRITE, got {operation!r}")
    if len(local) == 0 or len(local) != len(remote) or not np.array_equal(local[:, 1], remote[:, 1]):
        raise ValueError(
            f"both sides need the same number of descriptors, at least one, of equal lengths: "
            f"got {len(local)} local, {len(remote)} remote"
        )


def _locate(descs: Descriptors, regions: list[Region], owner: str) -> NDArray[np.int64]:
    """Index of the region that holds each descriptor whole: [n]. Raises ValueError if one is in none."""
    found = np.full(len(descs), -1, dtype=np.int64)
    for index, region in enumerate(regions):
        # Compared as offset and room left, so that a hostile length cannot overflow the sum.
        offset = descs[:, 0] - region.address
        found[(offset >= 0) & (offset <= region.length) & (descs[:, 1] <= region.length - offset)] = index
    if (found < 0).any():
        row = int(np.argmax(found < 0))
        address, length = int(descs[row, 0]), int(descs[row, 1])
        raise ValueError(f"descriptor {row} ({length} bytes at {address:#x}) is outside the memory {owner} registered")
    return found


def _merge(
    local: Descriptors, local_regions: NDArray[np.int64], remote: Descriptors, remote_regions: NDArray[np.int64]
) -> tuple[Descriptors, Descriptors, NDArray[np.int64]]:
    """Joins runs of rows that are adjacent on both sides and stay within one region on each."""
    lengths = local[:, 1]
    joins = (local[1:, 0] == local[:-1, 0] + lengths[:-1]) & (remote[1:, 0] == remote[:-1, 0] + lengths[:-1])
    joins &= (local_regions[1:] == local_regions[:-1]) & (remote_regions[1:] == remote_regions[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    local, remote = local[starts], remote[starts]
    local[:, 1] = remote[:, 1] = np.add.reduceat(lengths, starts)
    return local, remote, remote_regions[starts]
