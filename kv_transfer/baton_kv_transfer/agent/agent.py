"""The interface of a transfer agent: registered memory, peers by name, one-sided transfers.

The methods, parameters and states have the names and the meaning of `nixl_agent` in NIXL's Python
API:

- A transfer handle has at most one active post. The handle can be posted again after DONE or ERR.
- Transfers may end in any order. The notification of a transfer arrives after all its bytes.
- Adding a peer does not connect to it. Removing a peer disconnects it and ends its transfers in
  ERR.
- An agent is always a peer of itself, under its own name.
- `make_prepped_xfer` merges rows that are adjacent on both sides; `initialize_xfer` does not.

These things differ from NIXL:

- `create_agent` chooses the *transport*, which NIXL calls a backend. So no method has a parameter
  `backends`.
- Descriptors are rows of an array, not objects of the library. Each row is checked when a list or
  a transfer is made: a local row must be inside registered memory, and a row of a peer inside the
  memory that the peer's metadata lists.
- NIXL has no `set_wakeup` and `waiting`, which replace polling. NIXL also has no `fence`,
  `num_refused`, `failure` and `bytes_moved`.
- `XferHandle.error` has the reason for ERR.
- Errors are ValueError, KeyError and TransportError.
"""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.agent.descriptors import XferDescs, check_pairs, check_rows, select
from baton_kv_transfer.transports.transfer import (
    Descriptors,
    Post,
    Region,
    TransportError,
    XferState,
)

#: Agent name of the local side in prep_xfer_dlist.
INIT_AGENT = "NIXL_INIT_AGENT"


@dataclass(slots=True, eq=False)
class RegDescs:
    """Memory regions that one call of register_memory registered."""

    regions: list[Region]


@dataclass(slots=True, eq=False)
class KnownPeer:
    """One version of a peer's metadata.

    Handles (DlistHandle, XferHandle) refer to the version with which they were made. They become
    invalid when the agent removes the peer or adds different metadata of the peer.
    """

    #: The metadata; empty if the peer is the agent itself.
    metadata: bytes = b""
    #: The memory that the metadata lists. With NIXL the library has this list, and `regions` is
    #: empty.
    regions: list[Region] = field(default_factory=list)


class DlistHandle:
    """A checked list of descriptors, all in this agent's registered memory or all in one peer's."""

    def __init__(self, agent: str, descs: XferDescs, known_peer: KnownPeer | None) -> None:
        """Create a handle to checked descriptors.

        Args:
            agent: name of the peer; empty for the local side.
            descs: the checked descriptors.
            known_peer: the peer's metadata; None for the local side.
        """
        self.agent, self.descs, self.known_peer = agent, descs, known_peer
        self.released = False


class XferHandle:
    """A transfer between this agent and a peer, which can be posted repeatedly."""

    def __init__(
        self, peer: str, known_peer: KnownPeer | None, num_descs: int, notif: bytes
    ) -> None:
        """Create a handle that was not posted yet.

        Args:
            peer: name of the peer.
            known_peer: the peer's metadata.
            num_descs: number of descriptors after adjacent descriptors were merged.
            notif: notification for the peer after each post, unless the post has its own; empty
                for none.
        """
        self.peer, self.known_peer, self.num_descs, self.notif = peer, known_peer, num_descs, notif
        self.released = False
        #: The last post.
        self.post: Post | None = None

    @property
    def state(self) -> XferState | None:
        """State of the last post; None if the transfer was never posted."""
        return self.post.state if self.post else None

    @property
    def error(self) -> str:
        """Why the last post ended in ERR; empty if it has not ended in ERR."""
        return self.post.error if self.post else ""

    def check_post(self) -> None:
        """Check that the transfer may be posted now.

        Raises:
            ValueError: the handle was released, or its last post has not ended.
        """
        if self.released:
            raise ValueError("the transfer was released: make it again")
        if self.state is XferState.PROC:
            raise ValueError("the transfer is still active: post it again after DONE or ERR")


class Agent(abc.ABC):
    """Moves bytes between this process's registered memory and the registered memory of peers.

    Any thread may call the methods. Registering and deregistering memory, `fence` and `close` may
    block. With NIXL, `add_remote_agent` blocks while it connects. With the transport shm,
    `transfer` copies the bytes of a READ of up to 16 MiB before it returns. All other calls return
    without waiting.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None

    @property
    def num_refused(self) -> int:
        """Number of descriptors in peers' requests that this agent has refused.

        These descriptors were outside registered memory. The number is always 0 with NIXL, which
        does not report refused descriptors.
        """
        return 0

    @property
    def failure(self) -> str:
        """Why peers cannot connect to this agent any more, and the remedy; empty if they can.

        The text is always empty with NIXL, which does not report such failures.
        """
        return ""

    @property
    def bytes_moved(self) -> dict[str, int] | None:
        """Bytes sent and received, by transport, mechanism and device, such as `ucx tcp/lo`.

        None with NIXL, which does not report bytes. With shm, only the side that receives the bytes
        counts them, because that side makes the copy.
        """
        return None

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the function that the agent calls after a transfer ended or a notification arrived.

        The agent may call `wakeup` in any thread. The agent does not call it for events that are
        handled at the end of a block `with agent.waiting()`. This method is an addition to NIXL's
        Python API.
        """
        self._wakeup = wakeup

    def waiting(self) -> AbstractContextManager[int | None]:
        """Return a context manager for a wait until the agent has an event.

            with agent.waiting() as agent_fd:
                fds = [wakeup_fd] if agent_fd is None else [wakeup_fd, agent_fd]
                select.select(fds, [], [], timeout_s)

        In this example, the function given to `set_wakeup` writes to the eventfd `wakeup_fd`.
        `agent_fd` is None if another thread already handles the agent's events, and always with
        NIXL. Otherwise, the calling thread does the agent's pending work at the end of the block,
        so the agent's thread need not wake up. After the block, check the states of transfers and
        call `get_new_notifs`. This method is an addition to NIXL's Python API.
        """
        return contextlib.nullcontext()

    @abc.abstractmethod
    def register_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str = "DRAM"
    ) -> RegDescs:
        """Register memory for transfers. The memory must stay allocated until deregister_memory.

        Args:
            reg_list: (address, length in bytes, device id, free text) of each region.
            mem_type: DRAM or VRAM.

        Raises:
            ValueError: a region is empty, or the transport does not support memory of this type.
            TransportError: the agent is closed, or its thread does not answer.
        """

    @abc.abstractmethod
    def deregister_memory(self, dereg_list: RegDescs) -> None:
        """Deregister memory and end the peers' transfers that use it.

        This agent's own transfers of the memory must have ended before.

        Raises:
            TransportError: the agent is closed, or its thread does not answer. In the second case,
                peers may still reach the memory.
        """

    @abc.abstractmethod
    def get_agent_metadata(self) -> bytes:
        """Return the metadata with which a peer can reach the memory that is registered now."""

    @abc.abstractmethod
    def add_remote_agent(self, metadata: bytes) -> str:
        """Add the agent of a peer, and return its name.

        Adding the same metadata again has no effect, and different metadata replaces the peer's
        earlier metadata. Transfers made with the earlier metadata end in ERR: immediately if they
        are in flight, otherwise when they are posted.

        Raises:
            ValueError: the metadata is damaged, or is this agent's own, or the peer's metadata
                version or transport differs from this agent's.
            TransportError: the peer cannot be reached. Only NIXL connects during this call.
        """

    @abc.abstractmethod
    def remove_remote_agent(self, agent: str) -> None:
        """Disconnect and remove the agent of a peer. Transfers in flight with it end in ERR."""

    def get_xfer_descs(
        self,
        descs: Sequence[tuple[int, int, int]] | Descriptors | XferDescs,
        mem_type: str = "DRAM",
    ) -> XferDescs:
        """Return checked descriptors made from rows of (address, length, device id).

        XferDescs are returned unchanged.

        Raises:
            ValueError: the shape is not [n, 3], there is no row, a length is below 1, or the memory
                type is unknown.
        """
        return descs if isinstance(descs, XferDescs) else check_rows(descs, mem_type)

    @abc.abstractmethod
    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Sequence[tuple[int, int, int]] | Descriptors | XferDescs,
        mem_type: str = "DRAM",
    ) -> DlistHandle:
        """Check descriptors and return them as a list that many transfers can use.

        Args:
            agent_name: NIXL_INIT_AGENT or "" for the local side; for the remote side, the name of a
                peer or of this agent.
            xfer_list: as in get_xfer_descs.
            mem_type: DRAM or VRAM.

        Raises:
            KeyError: the peer is unknown.
            ValueError: a descriptor is outside the registered memory of that agent.
        """

    @abc.abstractmethod
    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: DlistHandle,
        local_indices: Sequence[int] | NDArray[np.int64],
        remote_xfer_side: DlistHandle,
        remote_indices: Sequence[int] | NDArray[np.int64],
        notif_msg: bytes = b"",
    ) -> XferHandle:
        """Return a transfer of selected rows of two prepared lists.

        The i-th selected local row is copied to or from the i-th selected remote row. Pairs that
        are adjacent in both memories are merged into one descriptor.

        Args:
            operation: READ copies from the remote to the local side, WRITE the other way.
            local_xfer_side: list of this agent's memory.
            local_indices: rows of `local_xfer_side`.
            remote_xfer_side: list of a peer's memory, or of this agent's own.
            remote_indices: rows of `remote_xfer_side`, as many as local rows.
            notif_msg: notification for the peer after all bytes have arrived; empty for none.

        Raises:
            ValueError: an index is out of range, the numbers of rows or the lengths of paired rows
                differ, or a list was released.
        """

    @abc.abstractmethod
    def initialize_xfer(
        self,
        operation: str,
        local_descs: XferDescs,
        remote_descs: XferDescs,
        remote_agent: str,
        notif_msg: bytes = b"",
    ) -> XferHandle:
        """Return a transfer between `local_descs` and `remote_descs`, row by row.

        `operation` and `notif_msg` have the same meaning as in `make_prepped_xfer`.

        Raises:
            KeyError: the peer is unknown.
            ValueError: the lists have different shapes, or a descriptor is outside registered
                memory.
        """

    @abc.abstractmethod
    def transfer(self, handle: XferHandle, notif_msg: bytes = b"") -> str:
        """Post a transfer and return its state: DONE, PROC (in progress) or ERR.

        Args:
            handle: the transfer.
            notif_msg: notification for this post; empty: the handle's notification.

        Raises:
            ValueError: the handle was released, or its last post has not ended.
            TransportError: the agent is closed.
        """

    def check_xfer_state(self, handle: XferHandle) -> str:
        """Return the state of the last post: DONE, PROC (in progress) or ERR.

        After DONE or ERR, the transfer does not touch local memory any more.

        Raises:
            ValueError: the transfer was never posted.
        """
        if handle.state is None:
            raise ValueError("the transfer was not posted: call transfer first")
        return handle.state.value

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return the notifications that arrived since the last call, by sender."""
        notifs: dict[str, list[bytes]] = {}
        for _ in range(len(self._notifs)):
            sender, message = self._notifs.popleft()
            notifs.setdefault(sender, []).append(message)
        return notifs

    @abc.abstractmethod
    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        """Send a notification without a transfer, in no fixed order relative to transfers.

        Raises:
            KeyError: the peer is unknown.
            TransportError: the agent is closed.
        """

    def release_xfer_handle(self, handle: XferHandle) -> None:
        """Release a transfer whose last post has ended.

        Raises:
            TransportError: the last post has not ended. `remove_remote_agent` aborts the transfer.
        """
        if handle.state is XferState.PROC:
            raise TransportError(
                "the transfer is active: wait for it, or abort it by remove_remote_agent"
            )
        handle.released = True

    def release_dlist_handle(self, handle: DlistHandle) -> None:
        """Release a descriptor list. Transfers made from it stay valid."""
        handle.released = True

    @abc.abstractmethod
    def fence(self) -> None:
        """Cut all peers off: no operation of a peer reaches registered memory afterwards.

        Transfers in flight end in ERR, and all peers are removed, but memory stays registered.
        To connect again, peers need new metadata from get_agent_metadata. This method is an
        addition to NIXL's Python API.

        Raises:
            TransportError: the agent is closed, or its thread does not answer. In the second case,
                peers may still reach the memory.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End the agent's thread, transfers and connections. A second call has no effect."""


def select_pairs(
    operation: str,
    local: DlistHandle,
    ours: NDArray[np.int64],
    remote: DlistHandle,
    theirs: NDArray[np.int64],
) -> tuple[Descriptors, Descriptors]:
    """Check and return the descriptors of a transfer, [n, 3] for each side.

    Args:
        operation: READ or WRITE.
        local: list of the local side.
        ours: row numbers in `local`.
        remote: list of a peer.
        theirs: row numbers in `remote`, as many as in `ours`.

    Raises:
        ValueError: `operation` is unknown, a row does not exist or none is selected, the numbers
            of rows or the lengths of paired rows differ, a list was released, or a list is of the
            wrong side.
    """
    if local.released or remote.released:
        raise ValueError("a descriptor list of this transfer was released: prepare it again")
    if local.agent or not remote.agent:
        raise ValueError(
            f"local_xfer_side must be prepared for {INIT_AGENT}, remote_xfer_side for a peer"
        )
    rows = select(local.descs.rows, ours), select(remote.descs.rows, theirs)
    check_pairs(operation, *rows)
    return rows


def unknown_peer_error(name: str) -> KeyError:
    return KeyError(f"agent {name} is not known: add_remote_agent(its metadata) first")
