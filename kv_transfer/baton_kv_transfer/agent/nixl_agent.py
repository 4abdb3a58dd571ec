"""An agent over the NIXL library: nixl_cu12 with its UCX backend.

Any NIXL program over UCX can be a peer.

What Baton adds around the library:

- A thread polls NIXL and pauses between polls. It replaces NIXL's own progress thread, which never
  pauses. Pauses last up to POLL_BUSY_S while transfers are in flight, and otherwise up to
  POLL_IDLE_S. The thread does not poll before a peer is added or this agent's metadata is
  requested.
- NIXL 1.5.1 reports ERR at once for transfers with a removed peer, although bytes still arrive. So
  a peer is removed from NIXL only after the peer's transfers have ended. If the transfers last
  longer than REMOVE_GRACE_S, NIXL's agent is destroyed and created again, which ends all transfers
  in flight. Handles, lists and other peers stay usable.
- `fence` also destroys NIXL's agent, creates it again, and removes all peers. Then a late write of
  a peer fails, because the connection is closed. UCX's shared memory (CMA), through which a peer
  can write without a connection, is off unless UCX_TLS turns it on. `fence` does not stop a peer on
  the same host that writes to GPU memory through cuda_ipc.
- A digest follows NIXL's metadata, because NIXL accepts damaged addresses and keys. NIXL itself
  ignores the digest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.agent import nixl_library
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
    run_starts,
)
from baton_kv_transfer.transports.transfer import (
    LOST_NOTIFICATION,
    Descriptors,
    Post,
    Region,
    TransportError,
    XferState,
)

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
POLL_MIN_S = 20e-6
POLL_BUSY_S = 200e-6
POLL_IDLE_S = 2e-3
REMOVE_GRACE_S = 1.0


class _Native:
    """A NIXL object that is built on first use, and again after NIXL's agent was re-created."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build
        self.value: Any = None

    def drop(self) -> None:
        if self.value is None:
            return
        # The library may refuse to release a transfer in flight. Destroying NIXL's agent ends it.
        with contextlib.suppress(Exception):
            self.value.release()
        # Otherwise, the wrapper keeps NIXL's agent alive, and logs an error on garbage collection.
        self.value._released, self.value._agent = True, None
        self.value = None


@dataclass(slots=True, eq=False)
class _RegDescs(RegDescs):
    rows: list[tuple[int, int, int, str]]
    mem_type: str
    native: Any


class _Dlist(DlistHandle):
    def __init__(
        self, agent: str, descs: XferDescs, peer: KnownPeer | None, native: _Native
    ) -> None:
        super().__init__(agent, descs, peer)
        self.native = native


class _Xfer(XferHandle):
    def __init__(
        self, peer: str, known_peer: KnownPeer | None, num_descs: int, notif: bytes, native: _Native
    ) -> None:
        super().__init__(peer, known_peer, num_descs, notif)
        self.native = native
        self.posted_notif = b""
        #: Why the current post ends in ERR: its peer was removed. Empty: its peer was not removed.
        self.removal_error = ""

    def end(self, error: str = "") -> None:
        assert self.post is not None, "only a posted transfer ends"
        self.post.end(error or self.removal_error)


class NixlAgent(Agent):
    """An agent that uses the NIXL library. A thread of the agent polls NIXL."""

    def __init__(self, name: str) -> None:
        """Load NIXL, create NIXL's agent, and start the polling thread.

        Raises:
            ValueError: nixl-cu12 is not installed.
        """
        super().__init__(name)
        self._api, self._errors = nixl_library.load()
        #: Held during calls of the library, and while the attributes below change.
        self._lock = threading.Condition(threading.RLock())
        self._natives: weakref.WeakSet[_Native] = weakref.WeakSet()
        self._registered: list[_RegDescs] = []
        self._own_peer = KnownPeer()
        self._peers: dict[str, KnownPeer] = {}
        #: Peers that were removed with transfers in flight, and the deadline of these transfers.
        self._removing: dict[str, float] = {}
        self._in_flight: list[_Xfer] = []
        self._is_metadata_requested = False  # after the request, a peer may connect at any time
        self._pause_s = POLL_MIN_S
        self._nixl: Any = nixl_library.create(self._api, self.name)
        self._thread = threading.Thread(target=self._run, name=f"nixl-{name}", daemon=True)
        self._thread.start()

    def register_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str = "DRAM"
    ) -> RegDescs:
        check_mem_type(mem_type)
        check_regions(reg_list, self.name)
        rows = list(reg_list)
        with self._lock:
            try:
                native = self._open().register_memory(rows, mem_type)
            except self._errors as error:
                raise ValueError(
                    f"NIXL cannot register {mem_type} memory at these addresses here: {error}"
                ) from None
            regions = [Region(address, length, mem_type, gpu) for address, length, gpu, _ in rows]
            self._registered.append(_RegDescs(regions, rows, mem_type, native))
            return self._registered[-1]

    def deregister_memory(self, dereg_list: RegDescs) -> None:
        assert isinstance(dereg_list, _RegDescs)
        with self._lock:
            self._registered.remove(dereg_list)
            self._open().deregister_memory(dereg_list.native)

    def get_agent_metadata(self) -> bytes:
        with self._lock:
            packed: bytes = self._open().get_agent_metadata()
            self._is_metadata_requested = True
            self._lock.notify()
        return nixl_library.seal(packed)

    def add_remote_agent(self, metadata: bytes) -> str:
        packed, name = nixl_library.unseal(metadata)
        if name == self.name:
            raise ValueError(
                f"the metadata is of an agent called {self.name}, which is this agent's own name"
            )
        with self._lock:
            nixl = self._open()
            known = self._peers.get(name)
            if known is not None and known.metadata == packed:
                return name
            self._peers.pop(name, None)
            if name in self._removing or self._posted_to(name):
                self._restart(f"agent {name} was replaced")
                nixl = self._open()
            elif known is not None:
                nixl.remove_remote_agent(name)
            try:
                nixl.add_remote_agent(packed)
            except self._errors as error:
                raise TransportError(f"NIXL cannot connect to {name}: {error}") from None
            self._peers[name] = KnownPeer(packed)
            self._lock.notify()
        return name

    def remove_remote_agent(self, agent: str) -> None:
        with self._lock:
            if self._peers.pop(agent, None) is None or self._nixl is None:
                return
            if posted := self._posted_to(agent):
                for xfer in posted:
                    xfer.removal_error = f"agent {agent} was removed"
                self._removing[agent] = time.monotonic() + REMOVE_GRACE_S
            else:
                self._nixl.remove_remote_agent(agent)

    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Sequence[tuple[int, int, int]] | Descriptors | XferDescs,
        mem_type: str = "DRAM",
    ) -> DlistHandle:
        descs = self.get_xfer_descs(xfer_list, mem_type)
        with self._lock:
            local = agent_name in ("", INIT_AGENT)
            peer = None if local else self._peer(agent_name)
            if local:
                self._locate(descs)
            native = self._native(
                lambda: self._nixl.prep_xfer_dlist(agent_name, descs.rows, descs.mem_type)
            )
            self._build(native, agent_name)
            return _Dlist("" if local else agent_name, descs, peer, native)

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
        num_descs = len(
            run_starts(*select_pairs(operation, local_xfer_side, ours, remote_xfer_side, theirs))
        )
        lists, rows = (
            (local_xfer_side.native, remote_xfer_side.native),
            (ours.astype(np.int32), theirs.astype(np.int32)),
        )

        def build() -> Any:
            local_list, remote_list = self._get(lists[0]), self._get(lists[1])
            return self._nixl.make_prepped_xfer(
                operation, local_list, rows[0], remote_list, rows[1]
            )

        with self._lock:
            peer = remote_xfer_side.agent
            return _Xfer(
                peer, remote_xfer_side.known_peer, num_descs, notif_msg, self._native(build)
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
        sides = (local_descs, remote_descs)

        def build() -> Any:
            local, remote = (self._nixl.get_xfer_descs(side.rows, side.mem_type) for side in sides)
            return self._nixl.initialize_xfer(operation, local, remote, remote_agent)

        with self._lock:
            self._locate(local_descs)
            peer = self._peer(remote_agent)
            native = self._native(build)
            self._build(native, remote_agent)
            return _Xfer(remote_agent, peer, len(local_descs), notif_msg, native)

    def transfer(self, handle: XferHandle, notif_msg: bytes = b"") -> str:
        assert isinstance(handle, _Xfer)
        with self._lock:
            handle.check_post()
            nixl = self._open()
            notif = notif_msg or handle.notif
            if handle.posted_notif and not notif:
                handle.native.drop()  # else the library would send the last post's notification
            handle.posted_notif = notif
            handle.post, handle.removal_error = Post(), ""
            known = self._own_peer if handle.peer == self.name else self._peers.get(handle.peer)
            if known is not handle.known_peer:
                handle.end(f"agent {handle.peer} was removed or replaced: make the transfer again")
            else:
                try:
                    if nixl.transfer(self._get(handle.native), notif) == "PROC":
                        self._in_flight.append(handle)
                        self._pause_s = POLL_MIN_S
                        self._lock.notify()
                    else:
                        self._collect(handle)
                except self._errors as error:
                    handle.end(f"the transfer with {handle.peer} could not be posted: {error}")
            state = handle.state
        assert state is not None
        if state is not XferState.PROC:
            self._wakeup()
        return state.value

    def check_xfer_state(self, handle: XferHandle) -> str:
        assert isinstance(handle, _Xfer)
        with self._lock:
            ended = handle in self._in_flight and self._collect(handle)
        if ended:
            self._wakeup()
        return super().check_xfer_state(handle)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        with self._lock:
            if self._nixl is not None:
                self._take_notifs()
            return super().get_new_notifs()

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        with self._lock:
            self._peer(remote_agent_name)
            try:
                self._open().send_notif(remote_agent_name, notif_msg)
            except self._errors as error:
                logger.warning(LOST_NOTIFICATION, remote_agent_name, error)

    def release_xfer_handle(self, handle: XferHandle) -> None:
        with self._lock:
            # Raises if the transfer is active. NIXL would release it while bytes still arrive.
            super().release_xfer_handle(handle)
            assert isinstance(handle, _Xfer)
            handle.native.drop()

    def fence(self) -> None:
        with self._lock:
            self._open()
            self._peers.clear()
            self._is_metadata_requested = False
            self._restart("all peers were cut off")
        self._wakeup()

    def close(self) -> None:
        with self._lock:
            self._destroy("the agent was closed")
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the thread that polls NIXL did not end within %.0f s", JOIN_TIMEOUT_S)
        self._wakeup()

    # The library's agent

    def _destroy(self, reason: str) -> None:
        """Destroy NIXL's agent.

        Transfers in flight end in ERR. Peers can no longer reach the registered memory.
        """
        for native in list(self._natives):
            native.drop()
        if self._nixl is not None:
            self._nixl.agent = None  # a traceback that holds the wrapper must not keep the agent
            self._nixl = None
        for xfer in self._in_flight:
            xfer.end(xfer.removal_error or reason)
        self._in_flight.clear()
        self._removing.clear()

    def _restart(self, reason: str) -> None:
        """Replace NIXL's agent with a new one that has the same memory and peers.

        Transfers in flight end in ERR. The error is `reason`, or `_Xfer.removal_error` if the
        transfer's peer was removed. A peer to which NIXL cannot connect again is removed.
        """
        self._destroy(reason)
        self._nixl = nixl = nixl_library.create(self._api, self.name)
        for registered in self._registered:
            registered.native = nixl.register_memory(registered.rows, registered.mem_type)
        for name, peer in list(self._peers.items()):
            try:
                nixl.add_remote_agent(peer.metadata)
            except self._errors as error:  # NIXL connects in this call, and the peer may be gone
                logger.warning(
                    "agent %s was removed: NIXL cannot connect to it again: %s", name, error
                )
                del self._peers[name]

    def _open(self) -> Any:
        if self._nixl is None:
            raise TransportError("the agent is closed")
        return self._nixl

    def _peer(self, name: str) -> KnownPeer:
        peer = self._own_peer if name == self.name else self._peers.get(name)
        if peer is None:
            raise unknown_peer_error(name)
        return peer

    def _posted_to(self, peer: str) -> list[_Xfer]:
        return [xfer for xfer in self._in_flight if xfer.peer == peer]

    def _locate(self, descs: XferDescs) -> None:
        locate(
            descs,
            [region for registered in self._registered for region in registered.regions],
            INIT_AGENT,
        )

    def _native(self, build: Callable[[], Any]) -> _Native:
        self._open()
        native = _Native(build)
        self._natives.add(native)
        return native

    def _get(self, native: _Native) -> Any:
        if native.value is None:
            native.value = native.build()
        return native.value

    def _build(self, native: _Native, owner: str) -> None:
        try:
            self._get(native)
        except self._errors as error:
            raise ValueError(
                f"NIXL finds a descriptor outside the memory that {owner} registered: {error}"
            ) from None

    # The polling thread

    def _run(self) -> None:
        while self._nixl is not None:
            has_event = False
            with self._lock:
                if self._nixl is not None and self._is_expecting():
                    try:
                        has_event = self._poll()
                    except Exception:
                        logger.exception(
                            "the thread that polls NIXL failed: all KV transfers of this engine "
                            "fail, and so do later ones; restart the engine"
                        )
                        self._destroy("the polling thread failed")
                        has_event = True
            if has_event:
                self._wakeup()
            with self._lock:
                if self._nixl is None:
                    return
                longest = POLL_BUSY_S if self._in_flight else POLL_IDLE_S
                self._pause_s = POLL_MIN_S if has_event else min(2 * self._pause_s, longest)
                self._lock.wait(self._pause_s if self._is_expecting() else None)

    def _is_expecting(self) -> bool:
        return bool(self._in_flight or self._removing or self._peers or self._is_metadata_requested)

    def _poll(self) -> bool:
        """Poll NIXL once; return whether a notification arrived or a transfer ended."""
        has_event = self._take_notifs()
        for xfer in list(self._in_flight):
            has_event |= self._collect(xfer)
        for name, deadline in list(self._removing.items()):
            if not self._posted_to(name):
                del self._removing[name]
                self._nixl.remove_remote_agent(name)
            elif time.monotonic() >= deadline:
                logger.warning(
                    "transfers with the removed agent %s did not end within %g s: restarting "
                    "NIXL's agent, which ends all transfers in flight",
                    name,
                    REMOVE_GRACE_S,
                )
                self._restart("NIXL's agent was restarted")
                return True
        return has_event

    def _take_notifs(self) -> bool:
        notifs: dict[str, list[bytes]] = self._nixl.get_new_notifs()
        for sender, messages in notifs.items():
            self._notifs.extend((sender, message) for message in messages)
        return bool(notifs)

    def _collect(self, xfer: _Xfer) -> bool:
        """Return whether a posted transfer has ended. If it has, record the transfer's result."""
        error = ""
        try:
            state = self._nixl.check_xfer_state(self._get(xfer.native))
            if state == "PROC":
                return False
            if state == "ERR":
                error = f"the transfer with {xfer.peer} failed"
        except self._errors as failure:
            error = f"the transfer with {xfer.peer} failed: {failure}"
        if xfer in self._in_flight:
            self._in_flight.remove(xfer)
        xfer.end(error)
        return True
