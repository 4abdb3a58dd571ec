"""Moves each running load through its states (see `load_state`)."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterator

import numpy as np
import zmq

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector import FailureReason, LoadRequest, LoadResult
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.consumer.block_verifier import BlockVerifier
from baton_kv_transfer.consumer.load_state import Load, LoadState, RankTransfer, RankTransferState
from baton_kv_transfer.consumer.peer import MAX_REASON_CHARACTERS, Peer, TransferMessage
from baton_kv_transfer.consumer.peer_registry import PeerRegistry
from baton_kv_transfer.consumer.published_blocks import PublishError, record_published
from baton_kv_transfer.consumer.rank_transfers import check_heads, create_rank_transfers
from baton_protocol.options.config import KVRole

logger = logging.getLogger(__name__)

#: A load in the state SETTLING waits this long for its reads, and then disconnects the peer. After
#: the same time again, a fence (`Agent.fence`) cuts all peers off.
SETTLE_TIMEOUT_S = 5.0
#: Longest interval between heartbeats. The interval is a third of the peer's lease or of
#: kv_transfer.load_timeout_s, whichever is shorter, up to this limit.
MAX_HEARTBEAT_S = 5.0


class LoadManager:
    """The running loads of this worker."""

    def __init__(
        self, context: ConnectorContext, peers: PeerRegistry, verifier: BlockVerifier
    ) -> None:
        """Create a manager without loads, and check the KV heads of this engine's workers.

        Raises:
            ValueError: the engine has more workers than KV heads, or this worker's heads are not in
                `context.ranks`.
        """
        check_heads(context)
        self._context = context
        self._memory, self._load_timeout_s = context.memory, context.config.load_timeout_s
        self._peers = peers
        self._verifier = verifier
        self._loads: dict[str, Load] = {}
        #: Transfer ids and results of ended loads, until `take_finished` removes them.
        self._finished: deque[tuple[str, LoadResult]] = deque()
        #: Loads with push that wait for slots, the oldest first.
        self._want_slots: dict[str, Load] = {}
        #: RELEASE messages to send. They are sent after the LoadResults, because the engine waits
        #: for the results.
        self._releases: list[tuple[Peer, side_channel.Release]] = []

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        """Iterate over a copy of the loads, because loads may end during the loop."""
        return iter(list(self._loads.values()))

    def get(self, transfer_id: str) -> Load | None:
        """Return the running load of a transfer; None if there is none."""
        return self._loads.get(transfer_id)

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` yields a result."""
        return bool(self._finished)

    def take_finished(self) -> Iterator[tuple[str, LoadResult]]:
        """Remove and yield the transfer ids and results of ended loads."""
        while self._finished:
            yield self._finished.popleft()

    def begin(self, request: LoadRequest, now: float) -> None:
        """Connect to the producer's worker 0, and create a load in the state HANDSHAKE.

        If the connection cannot be started, the load ends at once.
        """
        if request.transfer_id in self._loads:
            logger.error(
                "transfer %s is loading already; ignoring the second load", request.transfer_id
            )
            return
        host, port = request.remote_host, request.remote_port
        try:
            lead_peer = self._peers.connect(host, port, request.peer_instance_id, now)
        except zmq.ZMQError as error:  # not an address, or no socket is left
            self._context.stats.count_failure(FailureReason.PEER_LOST)
            why = f"cannot connect to {host}:{port}: {error}"
            self._finished.append((request.transfer_id, LoadResult(0, why)))
            return
        num_blocks = len(request.block_ids)
        has_fitting_blocks = 0 < num_blocks <= self._memory.num_slots
        load = Load(
            request,
            generation=1 + secrets.randbelow(2**63 - 1),
            lead_peer=lead_peer,
            started=now,
            # A push needs a slot for each block. If there are fewer slots, a pull reads in parts.
            push=self._context.config.mode == "push" and has_fitting_blocks,
            missing=np.zeros(num_blocks, dtype=np.int32),
        )
        self._loads[request.transfer_id] = load
        self.advance(load, now)

    def heartbeat_s(self, peer: Peer) -> float:
        """Return the interval in seconds between heartbeats to a worker of the producer."""
        return min(MAX_HEARTBEAT_S, self._load_timeout_s / 3, peer.lease_s / 3)

    def deadlines(self) -> list[float]:
        """Return the deadlines of all running loads. `Load.deadlines` explains them."""
        return [deadline for load in self._loads.values() for deadline in load.deadlines]

    # A load's states

    def advance_all(self, now: float) -> Iterator[tuple[str, LoadResult]]:
        """Move all loads through their states, then send RELEASE messages and post reads.

        If a load ends, try all loads again, because the ended load may have freed slots.

        Yields:
            The transfer id and the result of each load that has ended.
        """
        has_ended = True
        while has_ended:  # until no load has ended in the round
            count = len(self._loads)
            for load in self:
                self._take_transitions(load, now)
            has_ended = len(self._loads) < count
        yield from self.take_finished()
        self._send_releases()
        self._verifier.post()

    def advance(self, load: Load, now: float) -> None:
        """Move one load through its states as far as possible, and send RELEASE messages."""
        self._take_transitions(load, now)
        self._send_releases()

    def _take_transitions(self, load: Load, now: float) -> None:
        if load.state is LoadState.HANDSHAKE and load.lead_peer.is_ready:
            self._open_rank_transfers(load, now)
        if load.state is LoadState.LOADING:
            for rank_transfer in load.rank_transfers:
                if (
                    rank_transfer.state is RankTransferState.HANDSHAKE
                    and rank_transfer.peer.is_ready
                ):
                    self._subscribe(rank_transfer, now)
                if rank_transfer.is_complete and not rank_transfer.may_write:
                    self.release(rank_transfer)  # even if other per-rank transfers go on
            if all(rank_transfer.is_complete for rank_transfer in load.rank_transfers):
                load.state, load.settle_deadline = LoadState.SETTLING, now + SETTLE_TIMEOUT_S
        if load.state is LoadState.SETTLING:
            for rank_transfer in load.rank_transfers:
                self.release(rank_transfer)
            if all(rank_transfer.is_settled for rank_transfer in load.rank_transfers):
                self.end(load, now)

    def _open_rank_transfers(self, load: Load, now: float) -> None:
        """Connect to the workers of the producer, and create the load's per-rank transfers.

        Fail the load if a connection cannot be started, or if the lead peer is not worker 0.
        """
        lead = load.lead_peer
        if lead.rank != 0:
            why = f"{lead.name} is worker {lead.rank}, not the first one"
            self.fail(load, FailureReason.PROTOCOL, why, now)
            return
        workers, error = self._peers.connect_workers(lead, now)
        if error:
            self.fail(load, FailureReason.PEER_LOST, error, now)
            return
        load.rank_transfers = create_rank_transfers(self._context, load, workers, now)
        load.state = LoadState.LOADING
        load.missing += len(workers)

    def _subscribe(self, rank_transfer: RankTransfer, now: float) -> None:
        """Send SUBSCRIBE to a ready worker of the producer.

        A load without blocks sends no SUBSCRIBE, only RELEASE at its end. With push, SUBSCRIBE is
        sent only when the load has its slots. Until then, `advance_all` tries again.
        """
        load, peer, rank = rank_transfer.load, rank_transfer.peer, rank_transfer.rank
        expected, heads = load.lead_peer.ranks[rank].heads, peer.own_heads
        if (peer.rank, heads) != (rank, expected):
            why = (
                f"{peer.name} is worker {peer.rank} with KV heads [{heads.first}, {heads.end}), "
                f"{load.lead_peer.name} names worker {rank} with "
                f"[{expected.first}, {expected.end})"
            )
            self.fail(load, FailureReason.PROTOCOL, why, now)
            return
        if load.push and load.slots is None and not self._try_take_slots(load):
            return  # advance_all tries again, until the deadline of this per-rank transfer
        rank_transfer.state = RankTransferState.PUSHING if load.push else RankTransferState.OPEN
        self._record_progress(rank_transfer, now)
        if load.num_blocks == 0:
            return
        peer.next_heartbeat = min(peer.next_heartbeat, now + self.heartbeat_s(peer))
        peer.send(
            side_channel.Subscribe(
                load.transfer_id,
                load.generation,
                rank_transfer.heads,
                rank_transfer.subscriber,
                rank_transfer.num_subscribers,
                load.request.first_block_index,
                load.slots,
            )
        )

    def _try_take_slots(self, load: Load) -> bool:
        """Allocate the slots of a load with push. Return False if the load must wait.

        Only the load that has waited longest may take slots.
        """
        self._want_slots.setdefault(load.transfer_id, load)
        if next(iter(self._want_slots.values())) is load:
            load.slots = self._memory.accept(load.request.block_ids)
        if load.slots is not None:
            del self._want_slots[load.transfer_id]
        return load.slots is not None

    def release(self, rank_transfer: RankTransfer) -> None:
        """Queue RELEASE, and move the per-rank transfer to QUARANTINE or ENDED.

        Do nothing if RELEASE was queued before, or if blocks are in flight or not verified yet. In
        the state HANDSHAKE, do nothing until the peer is ready.
        """
        if (
            rank_transfer.is_released
            or rank_transfer.num_batches
            or not (rank_transfer.is_open or rank_transfer.peer.is_ready)
        ):
            return
        rank_transfer.state = (
            RankTransferState.QUARANTINE if rank_transfer.may_write else RankTransferState.ENDED
        )
        load = rank_transfer.load
        release = side_channel.Release(
            load.transfer_id,
            load.generation,
            rank_transfer.subscriber,
            rank_transfer.num_subscribers,
            completed=rank_transfer.is_complete,
        )
        self._releases.append((rank_transfer.peer, release))

    def _send_releases(self) -> None:
        for peer, release in self._releases:
            peer.send(release)
        self._releases.clear()

    def fail(self, load: Load, reason: FailureReason, error: str, now: float) -> None:
        """Move a load to SETTLING, and keep the failure for the load's LoadResult.

        Do nothing if the load is SETTLING already.
        """
        if load.state is LoadState.SETTLING:
            return
        load.state, load.settle_deadline = LoadState.SETTLING, now + SETTLE_TIMEOUT_S
        load.reason, load.error = reason, error
        self._want_slots.pop(load.transfer_id, None)
        for rank_transfer in load.rank_transfers:
            self._verifier.drop(rank_transfer)

    def end(self, load: Load, now: float) -> None:
        """Remove a load, free its slots, and record its LoadResult for `take_finished`."""
        del self._loads[load.transfer_id]
        if load.slots is not None:
            self._memory.release(load.slots)
        stats = self._context.stats
        if load.reason is not None:
            stats.count_failure(load.reason)
        else:
            stats.transfers_completed += 1
        stats.receive_seconds += now - load.started
        self._finished.append((load.transfer_id, load.result()))

    def check_deadlines(self, now: float) -> None:
        """Fail loads and peers whose deadline has passed.

        A load fails if one of its peers sends no block before the deadline. A peer fails if its
        reads for a SETTLING load do not end within SETTLE_TIMEOUT_S.
        """
        for load in self:
            is_overdue = load.state is LoadState.SETTLING and now >= load.settle_deadline
            for rank_transfer in load.rank_transfers:
                peer = rank_transfer.peer
                if is_overdue and rank_transfer.num_batches and not peer.error:
                    # The consumer side disconnects a failed peer. The peer's reads then end in ERR.
                    why = f"reads from {peer.name} did not end within {SETTLE_TIMEOUT_S:g} s"
                    peer.fail(FailureReason.PEER_LOST, why)
                    load.settle_deadline = now + SETTLE_TIMEOUT_S
                elif not rank_transfer.is_complete and now >= rank_transfer.deadline:
                    silence_s = now - rank_transfer.last_block
                    why = f"no progress from {peer.name}: no block for {silence_s:.1f} s"
                    self.fail(load, FailureReason.TIMEOUT, why, now)

    # Messages of a producer's worker

    def handle_message(self, peer: Peer, message: TransferMessage, now: float) -> None:
        """Apply a message from a producer's worker to each load that the message names.

        The message has no effect on a load that does not use `peer`. It has no effect either if
        its generation is that of an earlier load.
        """
        if isinstance(message, side_channel.Pending):
            self._extend_deadlines(peer, message.transfer_ids, now)
            return
        rank_transfer = self._find(peer, message.transfer_id)
        if rank_transfer is None:
            return  # the load has ended, or has no per-rank transfer from this peer
        load = rank_transfer.load
        match message:
            case side_channel.Publish(generation=load.generation) if (
                load.state is LoadState.LOADING and rank_transfer.is_open
            ):
                self._handle_publish(rank_transfer, message, now)
            case side_channel.Released(generation=load.generation):
                rank_transfer.end_writes()
            case side_channel.Cancelled(
                generation=load.generation | side_channel.ALL_GENERATIONS, reason=reason
            ):
                self.fail(
                    load, FailureReason.PRODUCER_CANCELLED, reason[:MAX_REASON_CHARACTERS], now
                )

    def _find(self, peer: Peer, transfer_id: str) -> RankTransfer | None:
        """Return a running load's per-rank transfer from `peer`; None if there is none."""
        load = self._loads.get(transfer_id)
        rank_transfers = load.rank_transfers if load is not None else ()
        return next((each for each in rank_transfers if each.peer is peer), None)

    def _handle_publish(
        self, rank_transfer: RankTransfer, message: side_channel.Publish, now: float
    ) -> None:
        try:
            new = record_published(rank_transfer, message)
        except PublishError as error:
            self.fail(rank_transfer.load, error.reason, str(error), now)
            return
        if new or (message.last and not rank_transfer.is_last_received):
            self._record_progress(rank_transfer, now)
        rank_transfer.is_last_received |= message.last
        if message.written and rank_transfer.state is RankTransferState.PUSHING:
            rank_transfer.num_written += len(new)
            self._verifier.verify(rank_transfer, new)
        else:
            self._verifier.read(rank_transfer, new)

    def record_verified(self, rank_transfer: RankTransfer, wrong: list[int], now: float) -> None:
        """Record that a batch was verified. Fail the load if `wrong` is not empty.

        Args:
            rank_transfer: the per-rank transfer of the batch.
            wrong: positions of blocks that differed from their checksums twice.
            now: the current time.
        """
        self._record_progress(rank_transfer, now)
        if wrong:
            load = rank_transfer.load
            index = load.request.first_block_index + wrong[0]
            why = f"block {index} of {rank_transfer.peer.name} differed from its checksum twice"
            self.fail(load, FailureReason.CHECKSUM, why, now)

    def _extend_deadlines(self, peer: Peer, transfer_ids: list[str], now: float) -> None:
        # Two engines with the role `both` could wait for each other's memory without end. With this
        # role, only blocks extend the deadline, and PENDING does not.
        if self._context.config.role is not KVRole.CONSUMER:
            return
        for transfer_id in transfer_ids:
            rank_transfer = self._find(peer, transfer_id)
            if rank_transfer is not None and not rank_transfer.is_released:
                rank_transfer.deadline = now + self._load_timeout_s

    def _record_progress(self, rank_transfer: RankTransfer, now: float) -> None:
        rank_transfer.last_block, rank_transfer.deadline = now, now + self._load_timeout_s
