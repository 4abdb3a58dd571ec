"""The consumer's half of the connector: loads, from the first greeting to the one LoadResult. Lives on the connector's thread.

    GREETING   the handshake with the producer is under way
    WAITING    subscribed; published blocks are read and proved as they come
    DRAINING   the outcome is known, reads into this engine's memory are still in flight

A load ends only when none of its reads is in flight: reads that do not end are aborted by disconnecting the peer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import zmq

from baton_kv_transfer import checksum, side_channel
from baton_kv_transfer.agent import INIT_AGENT, Agent, DlistHandle, XferHandle
from baton_kv_transfer.connector import BlockLoad, ConnectorStats, KVCacheLayout, LoadResult
from baton_kv_transfer.peer import Peer, TransferMessage
from baton_kv_transfer.side_channel import PublishedBlock

logger = logging.getLogger(__name__)

MAX_READS_IN_FLIGHT = 4
"""Transfers posted at a time, over all loads; the rest queue."""
MAX_READ_BYTES = 32 * 2**20
"""Longer batches are split, so that proving one overlaps reading the next."""
MAX_HEARTBEAT_S = 5.0
"""A third of the shortest lease any producer grants, at most this."""
MAX_PENDING_S = 600.0
"""A load waits this long without a block at most, however often the producer says that it is pending."""
DRAIN_TIMEOUT_S = 5.0
"""A failed or cancelled load waits this long for its reads before the peer is disconnected."""


@dataclass(slots=True)
class _Load:
    """One BlockLoad under way."""

    load: BlockLoad
    peer: Peer
    started: float
    last_block: float
    """When blocks were published or proved last."""
    deadline: float
    arrived: list[bool] = field(default_factory=list)
    """By position in the load: read and proved."""
    requested: set[int] = field(default_factory=set)
    """Positions whose publication came; a second one is ignored."""
    reads: int = 0
    """In flight."""
    error: str = ""
    draining: bool = False
    retried: set[int] = field(default_factory=set)
    """Positions read a second time because their checksum differed."""

    @property
    def num_valid_blocks(self) -> int:
        return self.arrived.index(False) if False in self.arrived else len(self.arrived)


@dataclass(slots=True)
class _Read:
    load: _Load
    positions: list[int]
    blocks: list[PublishedBlock]
    handle: XferHandle | None = None


class ConsumerSide:
    def __init__(
        self,
        agent: Agent,
        *,
        instance_id: str,
        compatibility_hash: str,
        load_timeout_s: float,
        max_pending_s: float,
        stats: ConnectorStats,
        finished: Callable[[str, LoadResult], None],
    ) -> None:
        """
        Args:
            load_timeout_s: a load ends after this long without blocks and without word that more will come.
            max_pending_s: and after this long without blocks in any case.
        """
        self._agent = agent
        self._instance_id = instance_id
        self._compatibility_hash = compatibility_hash
        self._load_timeout_s = load_timeout_s
        self._max_pending_s = max_pending_s
        self._heartbeat_s = min(MAX_HEARTBEAT_S, load_timeout_s / 3)
        self._stats = stats
        self._finished = finished
        self._loads: dict[str, _Load] = {}
        self._peers: dict[tuple[str, int, str], Peer] = {}
        self._queue: deque[_Read] = deque()
        self._in_flight: list[_Read] = []
        self._next_heartbeat = 0.0
        self._layout: KVCacheLayout | None = None
        self._base_address = 0
        self._blocks: DlistHandle | None = None

    def serve(self, base_address: int, layout: KVCacheLayout) -> None:
        self._base_address, self._layout = base_address, layout
        nbytes = layout.block_nbytes
        descs = np.zeros((layout.num_blocks, 3), dtype=np.int64)
        descs[:, 0] = base_address + np.arange(layout.num_blocks, dtype=np.int64) * nbytes
        descs[:, 1] = nbytes
        self._blocks = self._agent.prep_xfer_dlist(INIT_AGENT, descs)

    # -- from the scheduler

    def begin(self, load: BlockLoad) -> None:
        if load.transfer_id in self._loads:
            logger.error("transfer %s is being loaded already; the second load is ignored", load.transfer_id)
            return
        assert self._layout is not None
        now = time.monotonic()
        key = (load.remote_host, load.remote_port, load.peer_instance_id)
        peer = self._peers.get(key)
        if peer is None:
            try:
                peer = Peer(
                    self._agent,
                    host=load.remote_host,
                    port=load.remote_port,
                    peer_instance_id=load.peer_instance_id,
                    instance_id=self._instance_id,
                    compatibility_hash=self._compatibility_hash,
                    layout=self._layout,
                )
            except zmq.ZMQError as error:  # no address, or no socket left
                self._stats.transfers_failed += 1
                reason = f"cannot connect to {load.remote_host}:{load.remote_port}: {error}"
                self._finished(load.transfer_id, LoadResult(0, reason))
                return
            self._peers[key] = peer
        state = _Load(load, peer, now, now, now + self._load_timeout_s, [False] * len(load.block_ids))
        self._loads[load.transfer_id] = state
        if peer.ready:
            self._subscribe(state)

    def cancel(self, transfer_id: str) -> None:
        state = self._loads.get(transfer_id)
        if state is not None:
            self._fail(state, "cancelled")

    def fail_all(self, reason: str) -> None:
        """Ends every load at once; for use when the agent is closed and nothing writes to memory any more."""
        self._queue.clear()
        self._in_flight.clear()
        for state in list(self._loads.values()):
            state.error, state.reads = state.error or reason, 0
            self._end(state)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    # -- from the thread's loop

    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    def advance(self, now: float) -> None:
        """Everything that can happen now: messages, ended reads, new reads, deadlines."""
        for peer in list(self._peers.values()):
            was_ready = peer.ready
            for message in peer.receive(now):
                self._handle(peer, message)
            if peer.ready and not was_ready:
                self._heartbeat_s = min(self._heartbeat_s, peer.lease_s / 3)
                self._next_heartbeat = min(self._next_heartbeat, now + self._heartbeat_s)
                for state in [state for state in self._loads.values() if state.peer is peer and not state.draining]:
                    self._subscribe(state)
        self._collect_reads()
        for peer in [peer for peer in self._peers.values() if peer.error]:
            self._drop(peer)
        for state in list(self._loads.values()):
            if now >= state.deadline:
                self._deadline_passed(state)
        self._post_reads()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            self._send_heartbeats()

    def next_deadline(self) -> float | None:
        if not self._loads:
            return None
        deadlines = [state.deadline for state in self._loads.values()]
        deadlines += [peer.handshake_deadline for peer in self._peers.values() if not peer.ready]
        return min(self._next_heartbeat, *deadlines)

    def _subscribe(self, state: _Load) -> None:
        """The peer is ready. A load of nothing only frees the producer's side."""
        transfer_id = state.load.transfer_id
        if not state.arrived:
            self._end(state)
            return
        state.peer.send(side_channel.Subscribe(transfer_id))

    def _handle(self, peer: Peer, message: TransferMessage) -> None:
        if isinstance(message, side_channel.Pending):
            self._still_pending(peer, message.transfer_ids)
            return
        state = self._loads.get(message.transfer_id)
        if state is None or state.peer is not peer:
            return
        if isinstance(message, side_channel.Cancelled):
            self._fail(state, message.reason)
            return
        if state.draining:
            return
        self._progress(state)
        load, read = state.load, _Read(state, [], [])
        for block in message.blocks:
            position = block.index - load.first_block_index
            if not 0 <= position < len(load.block_ids) or position in state.requested:
                continue  # in the prefix cache already, or past what is wanted
            if block.chain_hash != load.block_hashes[position]:
                self._fail(state, f"block {block.index} holds other tokens at the producer")
                break
            if not 0 <= block.block_id < peer.num_blocks:
                self._fail(state, f"block {block.index}: the producer has no block {block.block_id}")
                break
            state.requested.add(position)
            read.positions.append(position)
            read.blocks.append(block)
        self._enqueue(read)
        if message.last and not state.draining and len(state.requested) < len(load.block_ids):
            self._fail(
                state, f"the producer published {len(state.requested)} of {len(load.block_ids)} blocks asked for"
            )

    def _enqueue(self, read: _Read) -> None:
        assert self._layout is not None
        step = max(1, MAX_READ_BYTES // self._layout.block_nbytes)
        for start in range(0, len(read.positions), step):
            stop = start + step
            self._queue.append(_Read(read.load, read.positions[start:stop], read.blocks[start:stop]))

    def _post_reads(self) -> None:
        while self._queue and len(self._in_flight) < MAX_READS_IN_FLIGHT:
            read = self._queue.popleft()
            state = read.load
            if state.draining:
                continue
            assert self._blocks is not None
            assert state.peer.blocks is not None
            ours = [state.load.block_ids[position] for position in read.positions]
            theirs = [block.block_id for block in read.blocks]
            read.handle = self._agent.make_prepped_xfer("READ", self._blocks, ours, state.peer.blocks, theirs)
            self._agent.transfer(read.handle)
            state.reads += 1
            self._in_flight.append(read)

    def _collect_reads(self) -> None:
        for read in list(self._in_flight):
            assert read.handle is not None
            outcome = self._agent.check_xfer_state(read.handle)
            if outcome == "PROC":
                continue
            self._in_flight.remove(read)
            self._agent.release_xfer_handle(read.handle)
            state = read.load
            state.reads -= 1
            if outcome == "ERR":
                state.peer.fail(f"reading from {state.peer.name} failed: {read.handle.error}")
            elif not state.draining:
                self._prove(read)
            if state.draining and state.reads == 0 and state.load.transfer_id in self._loads:
                self._end(state)

    def _prove(self, read: _Read) -> None:
        """Checks what arrived; blocks that differ are read once more, then given up."""
        state, layout = read.load, self._layout
        assert layout is not None
        load, again = state.load, _Read(read.load, [], [])
        for position, block in zip(read.positions, read.blocks, strict=True):
            address = self._base_address + load.block_ids[position] * layout.block_nbytes
            word_sum = checksum.block_sum(address, layout.block_nbytes)
            if checksum.bind(word_sum, load.transfer_id, load.block_hashes[position]) == block.checksum:
                if not state.arrived[position]:
                    state.arrived[position] = True
                    self._stats.blocks_received += 1
                    self._stats.bytes_received += layout.block_nbytes
                continue
            self._stats.checksum_failures += 1
            if position in state.retried:
                self._fail(state, f"block {block.index} differs from its checksum, twice")
            else:
                state.retried.add(position)
                again.positions.append(position)
                again.blocks.append(block)
        if state.draining:
            return
        self._progress(state)
        self._enqueue(again)
        if all(state.arrived):
            state.draining = True
            if state.reads == 0:
                self._end(state)

    def _progress(self, state: _Load) -> None:
        state.last_block = time.monotonic()
        state.deadline = state.last_block + self._load_timeout_s

    def _still_pending(self, peer: Peer, transfer_ids: list[str]) -> None:
        now = time.monotonic()
        for transfer_id in transfer_ids:
            state = self._loads.get(transfer_id)
            if state is not None and state.peer is peer and not state.draining:
                limit = state.last_block + self._max_pending_s
                state.deadline = max(state.deadline, min(now + self._load_timeout_s, limit))

    def _fail(self, state: _Load, reason: str) -> None:
        """The outcome is known; it is reported once no read is in flight."""
        if state.draining:
            return
        state.error, state.draining = reason, True
        state.deadline = time.monotonic() + DRAIN_TIMEOUT_S
        if state.reads == 0:
            self._end(state)

    def _deadline_passed(self, state: _Load) -> None:
        if not state.draining:
            silence_s = time.monotonic() - state.last_block
            self._fail(state, f"no progress from {state.peer.name}: no block for {silence_s:.1f} s")
            return
        # Reads that do not end: disconnecting aborts them, and their ERR ends the load.
        state.peer.fail(f"reads from {state.peer.name} did not end within {DRAIN_TIMEOUT_S:g} s")
        state.deadline = time.monotonic() + DRAIN_TIMEOUT_S
        self._drop(state.peer)

    def _drop(self, peer: Peer) -> None:
        """The peer is lost: its connection goes, its loads fail; the next load greets anew."""
        for key, known in list(self._peers.items()):
            if known is peer:
                del self._peers[key]
        peer.close()
        for state in [state for state in self._loads.values() if state.peer is peer]:
            self._fail(state, peer.error)

    def _end(self, state: _Load) -> None:
        load, peer = state.load, state.peer
        del self._loads[load.transfer_id]
        if peer.ready and not peer.error:
            peer.send(side_channel.Release(load.transfer_id, completed=not state.error))
        if state.error:
            self._stats.transfers_failed += 1
        else:
            self._stats.transfers_completed += 1
        self._stats.receive_seconds += time.monotonic() - state.started
        self._finished(load.transfer_id, LoadResult(state.num_valid_blocks, state.error))

    def _send_heartbeats(self) -> None:
        by_peer: dict[int, tuple[Peer, list[str]]] = {}
        for transfer_id, state in self._loads.items():
            if state.peer.ready:
                by_peer.setdefault(id(state.peer), (state.peer, []))[1].append(transfer_id)
        for peer, transfer_ids in by_peer.values():
            peer.send(side_channel.Heartbeat(transfer_ids))
