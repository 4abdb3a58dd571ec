"""The transfer agent: registered memory, peers by name, one-sided transfers with notifications. NIXL's names and semantics.

    one active post per handle, posted again only after DONE or ERR; no order among transfers; a transfer's notification
    arrives after all its descriptors; adding a peer's metadata does not connect; removing a peer disconnects, its transfers in
    flight end in ERR; the agent's own name is a peer that is always known; `make_prepped_xfer` merges runs that are adjacent on
    both sides, `initialize_xfer` does not.

`create_agent` makes one: over a transport of ours (`transport_agent`), or the real library (`transports.nixl`).
Every descriptor is checked against registered memory, the peer's against its metadata.
"""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

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

INIT_AGENT = "NIXL_INIT_AGENT"
"""Agent name of the local side in prep_xfer_dlist."""


class RegDescs:
    """Registered memory, as register_memory returned it."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions


class DlistHandle:
    """A checked descriptor list, local or of one peer."""

    def __init__(self, agent: str, descs: XferDescs, known_peer: object) -> None:
        """
        Args:
            agent: the peer's name; empty: this side.
            known_peer: an object per metadata of the peer: another one after the metadata was replaced.
        """
        self.agent, self.descs, self.known_peer = agent, descs, known_peer
        self.released = False


class XferHandle:
    """A transfer that can be posted."""

    def __init__(self, peer: str, known_peer: object, num_descs: int, notif: bytes) -> None:
        """
        Args:
            known_peer: as in DlistHandle.
            num_descs: after merging.
        """
        self.peer, self.known_peer, self.num_descs, self.notif = peer, known_peer, num_descs, notif
        self.released = False
        self.post: Post | None = None
        """The last one."""

    @property
    def state(self) -> XferState | None:
        """State of the last post; None before the first."""
        return self.post.state if self.post else None

    @property
    def error(self) -> str:
        """Why the state is ERR."""
        return self.post.error if self.post else ""


class Agent(abc.ABC):
    """Moves bytes between registered memory here and at peers. Methods may be called from any thread and return at once, save
    those that register or deregister memory, fence and close."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._wakeup: Callable[[], None] = lambda: None

    @property
    def num_refused(self) -> int:
        """Descriptors that peers named, this side was to execute, and refused: they were outside registered memory.

        0 over NIXL, whose library refuses unseen.
        """
        return 0

    @property
    def bytes_moved(self) -> dict[str, int] | None:
        """Bytes sent and received so far, by transport and transport, such as `ucx tcp/lo`. None over NIXL, which counts none.

        A copy between processes of one host counts where it is made: at the side that receives.
        """
        return None

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called, from any thread, after a transfer ended or a notification arrived; but see `waiting`.

        (Not in NIXL, where one polls.)
        """
        self._wakeup = wakeup

    def waiting(self) -> AbstractContextManager[int | None]:
        """Around a sleep until `wakeup` is called: no other thread has to wake up first, its work is the caller's.

        Gives a descriptor to poll within it beside the caller's own, or None; once it is readable, leave, and look for what ended
        or arrived: `wakeup` is not called for what came up on leaving. (Not in NIXL.)
        """
        return contextlib.nullcontext()

    @abc.abstractmethod
    def register_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str = "DRAM"
    ) -> RegDescs:
        """Makes memory usable in transfers; it must stay allocated until deregister_memory.

        Args:
            reg_list: (address, length in bytes, device id, free text) of each region.
            mem_type: DRAM or VRAM.

        Raises:
            ValueError: the transport does not move memory of this type here.
        """

    @abc.abstractmethod
    def deregister_memory(self, dereg_list: RegDescs) -> None: ...

    @abc.abstractmethod
    def get_agent_metadata(self) -> bytes:
        """What a peer needs to reach this agent's memory as registered now."""

    @abc.abstractmethod
    def add_remote_agent(self, metadata: bytes) -> str:
        """Makes a peer known and returns its name. The same metadata twice is once; newer metadata replaces the older: transfers
        made with the older are not posted any more, those in flight end in ERR.

        Raises:
            ValueError: damaged metadata, this agent's own, or of another version or transport.
            TransportError: the peer is not reached, where the transport connects at once.
        """

    @abc.abstractmethod
    def remove_remote_agent(self, agent: str) -> None:
        """Disconnects and forgets a peer; its transfers in flight end in ERR."""

    def get_xfer_descs(
        self, descs: Sequence[tuple[int, int, int]] | Descriptors, mem_type: str = "DRAM"
    ) -> XferDescs:
        """Descriptors from (address, length, device id) rows.

        Raises:
            ValueError: not [n, 3], no row at all, a length below 1, or an unknown memory type.
        """
        return check_rows(descs, mem_type)

    @abc.abstractmethod
    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Sequence[tuple[int, int, int]] | Descriptors | XferDescs,
        mem_type: str = "DRAM",
    ) -> DlistHandle:
        """Checks descriptors once for use in many transfers.

        Args:
            agent_name: NIXL_INIT_AGENT or "" for the local side, else a peer's name, or this agent's own.

        Raises:
            KeyError: unknown peer.
            ValueError: a descriptor is outside the memory that side registered.
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
        """A transfer between rows of two prepared lists, pairwise; runs adjacent on both sides become one descriptor.

        Raises:
            ValueError: rows that do not exist or cannot be paired, or a list that was released.
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
        """A transfer between two descriptor lists, pairwise.

        Raises:
            KeyError: unknown peer.
            ValueError: lists of different shape, or a descriptor outside registered memory.
        """

    @abc.abstractmethod
    def transfer(self, handle: XferHandle, notif_msg: bytes = b"") -> str:
        """Posts a transfer: DONE, PROC or ERR. `notif_msg` replaces the handle's notification for this post.

        Raises:
            ValueError: the handle was released, or its last post has not ended.
            TransportError: the agent is closed.
        """

    def check_xfer_state(self, handle: XferHandle) -> str:
        """DONE, PROC or ERR of the last post; after DONE and ERR local memory is not touched any more.

        Raises:
            ValueError: never posted.
        """
        if handle.state is None:
            raise ValueError("the transfer was not posted: call transfer first")
        return handle.state.value

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Notifications since the last call, by sender."""
        notifs: dict[str, list[bytes]] = {}
        for _ in range(len(self._notifs)):
            sender, message = self._notifs.popleft()
            notifs.setdefault(sender, []).append(message)
        return notifs

    @abc.abstractmethod
    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        """Sends a notification of its own, in no order with transfers.

        Raises:
            KeyError: unknown peer.
            TransportError: the agent is closed.
        """

    def release_xfer_handle(self, handle: XferHandle) -> None:
        """Forgets a transfer; does not block.

        Raises:
            TransportError: it is active, its memory still in use; remove_remote_agent aborts it.
        """
        if handle.state is XferState.PROC:
            raise TransportError(
                "the transfer is active: wait for it, or abort it by remove_remote_agent"
            )
        handle.released = True

    def release_dlist_handle(self, handle: DlistHandle) -> None:
        """Forgets a descriptor list; transfers made from it stay valid."""
        handle.released = True

    @abc.abstractmethod
    def fence(self) -> None:
        """Cuts all peers off: when it returns, nothing that a peer began still reaches registered memory. (Not in NIXL.)

        TransferManager in flight ended in ERR, all peers are forgotten, and this agent's earlier metadata leads nowhere: peers need what
        get_agent_metadata returns now. Memory stays registered.

        Raises:
            TransportError: the agent is closed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the agent's thread and all transfers; peers see the connection go away. Idempotent."""


def check_post(handle: XferHandle) -> None:
    """Raises ValueError unless the handle may be posted now."""
    if handle.released:
        raise ValueError("the transfer was released: make it again")
    if handle.state is XferState.PROC:
        raise ValueError("the transfer is still active: post it again after DONE or ERR")


def pair(
    operation: str,
    local: DlistHandle,
    ours: NDArray[np.int64],
    remote: DlistHandle,
    theirs: NDArray[np.int64],
) -> tuple[Descriptors, Descriptors]:
    """The chosen rows of a list of this side and of one of a peer. Raises ValueError as make_prepped_xfer."""
    if local.released or remote.released:
        raise ValueError("a descriptor list of this transfer was released: prepare it again")
    if local.agent or not remote.agent:
        raise ValueError(
            f"local_xfer_side must be prepared for {INIT_AGENT}, remote_xfer_side for a peer"
        )
    rows = select(local.descs.rows, ours), select(remote.descs.rows, theirs)
    check_pairs(operation, *rows)
    return rows


def unknown_peer(name: str) -> KeyError:
    return KeyError(f"agent {name} is not known: add_remote_agent(its metadata) first")
