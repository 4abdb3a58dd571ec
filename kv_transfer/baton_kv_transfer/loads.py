"""The loads under way: moves each along its states (see `load`) and takes in what producers say about it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator

import numpy as np
import zmq

from baton_kv_transfer import side_channel
from baton_kv_transfer.blocks import BlockMover
from baton_kv_transfer.connector import BlockLoad, FailureReason, LoadResult
from baton_kv_transfer.context import ConnectorContext
from baton_kv_transfer.load import Leg, LegState, Load, LoadState
from baton_kv_transfer.peer import MAX_REASON_CHARACTERS, Peer, TransferMessage
from baton_kv_transfer.peers import Peers
from baton_protocol.config import KVRole

MAX_PENDING_S = 600.0
"""A load waits this long without a block at most, however often the producer says that it is pending."""
DRAIN_TIMEOUT_S = 5.0
"""A load whose outcome is known waits this long for its reads, then disconnects the peer; this long again, then it fences."""
MAX_HEARTBEAT_S = 5.0
"""Every third of the shorter of the peer's lease and this side's timeout, at least this often."""


class Loads:
    def __init__(
        self,
        context: ConnectorContext,
        peers: Peers,
        blocks: BlockMover,
        finished: Callable[[str, LoadResult], None],
    ) -> None:
        """
        Raises:
            ValueError: the workers' heads are replicated, or this worker is not among them.
        """
        self._context = context
        self._memory, self._load_timeout_s = context.memory, context.config.load_timeout_s
        heads, num_heads = context.memory.layout.heads, context.memory.layout.num_model_heads
        self._worker_heads = [rank.heads for rank in context.ranks]
        if len(context.ranks) > num_heads:
            raise ValueError(
                f"{len(context.ranks)} workers share {num_heads} KV heads: blocks of replicated heads are not exchanged"
            )
        if heads not in self._worker_heads:
            raise ValueError(
                f"this worker's {heads} are not among the engine's: {self._worker_heads}"
            )
        self._peers = peers
        self._blocks = blocks
        self._finished = finished
        self._loads: dict[str, Load] = {}
        self._want_slots: dict[str, Load] = {}
        """Those to be pushed that wait for slots, the oldest first."""
        self._releases: list[tuple[Peer, side_channel.Release]] = []
        """To be said once results were reported: those are waited for."""

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        """May be changed meanwhile."""
        return iter(list(self._loads.values()))

    def get(self, transfer_id: str) -> Load | None:
        return self._loads.get(transfer_id)

    def begin(self, wish: BlockLoad, first_worker: Peer, now: float) -> None:
        load = Load(
            wish,
            generation=1 + secrets.randbelow(2**63 - 1),
            first_worker=first_worker,
            started=now,
            push=self._context.config.mode == "push",
            missing=np.zeros(len(wish.block_ids), dtype=np.int32),
        )
        self._loads[wish.transfer_id] = load
        self.step(load, now)

    def workers(self, first: Peer, now: float) -> list[Peer]:
        """The producer's workers whose heads are needed here, as far as its first one named them, greeted."""
        workers = []
        for rank, address in enumerate(first.ranks if first.ready else ()):
            if self._memory.layout.heads.overlap(address.heads).count:
                with contextlib.suppress(zmq.ZMQError):  # no address: the load will find it out
                    known = first if rank == 0 else None
                    workers.append(
                        known
                        or self._peers.greet(
                            address.host, address.port, first.peer_instance_id, now
                        )
                    )
        return workers

    def heartbeat_s(self, peer: Peer) -> float:
        return min(MAX_HEARTBEAT_S, self._load_timeout_s / 3, peer.lease_s / 3)

    def deadlines(self) -> list[float]:
        deadlines = []
        for load in self._loads.values():
            if load.state is LoadState.DRAINING:
                deadlines.append(load.drain_deadline)
            deadlines += [leg.deadline for leg in load.legs if not leg.complete]
        return deadlines

    # -- a load's states

    def step_all(self, now: float) -> None:
        """Moves all loads on; those that end may make room for others."""
        count = 0
        while count != len(self._loads):
            count = len(self._loads)
            for load in self:
                self._step(load, now)
        self._say_releases()
        self._blocks.post()

    def step(self, load: Load, now: float) -> None:
        """Moves the load on as far as it can go."""
        self._step(load, now)
        self._say_releases()

    def _step(self, load: Load, now: float) -> None:
        if load.state is LoadState.GREETING and load.first_worker.ready:
            self._open_legs(load, now)
        if load.state is LoadState.LOADING:
            for leg in load.legs:
                if leg.state is LegState.GREETING and leg.peer.ready:
                    self._subscribe(leg, now)
                if leg.complete and (leg.is_last_write_over or not leg.quarantined):
                    self.release(leg)  # its part is done, also if others' go on
            if all(leg.complete for leg in load.legs):
                load.state, load.drain_deadline = LoadState.DRAINING, now + DRAIN_TIMEOUT_S
        if load.state is LoadState.DRAINING:
            for leg in load.legs:
                self.release(leg)
            if all(leg.settled for leg in load.legs):
                self.end(load, now)

    def _open_legs(self, load: Load, now: float) -> None:
        """The first worker is ready and named the others."""
        first, heads = load.first_worker, self._memory.layout.heads
        if first.rank != 0:
            self.fail(
                load,
                FailureReason.PROTOCOL,
                f"{first.name} is worker {first.rank}, not the first one",
                now,
            )
            return
        legs = []
        for rank, address in enumerate(first.ranks):
            shared = heads.overlap(address.heads)
            if shared.count == 0:
                continue
            try:
                peer = (
                    self._peers.greet(address.host, address.port, load.wish.peer_instance_id, now)
                    if rank
                    else first
                )
            except zmq.ZMQError as error:
                why = f"cannot connect to worker {rank} of {first.name} at {address.host}:{address.port}: {error}"
                self.fail(load, FailureReason.PEER_LOST, why, now)
                return
            subscribers = [
                other for other in self._worker_heads if other.overlap(address.heads).count
            ]
            legs.append(
                Leg(
                    load,
                    peer,
                    rank,
                    shared,
                    block_nbytes=shared.count * self._memory.layout.head_nbytes,
                    subscriber=subscribers.index(heads),
                    num_subscribers=len(subscribers),
                    last_block=now,
                    deadline=now + self._load_timeout_s,
                    slots_there=np.full(load.num_blocks, -1, dtype=np.int64),
                    checksums=[0] * load.num_blocks,
                    reread=np.zeros(load.num_blocks, dtype=np.bool_),
                )
            )
        load.legs, load.state = legs, LoadState.LOADING
        load.missing += len(legs)

    def _subscribe(self, leg: Leg, now: float) -> None:
        """The leg's worker is ready. A load of nothing only frees the producer's side."""
        load, peer = leg.load, leg.peer
        heads = self._memory.layout.heads.overlap(peer.ranks[peer.rank].heads)
        if (peer.rank, heads) != (leg.rank, leg.heads):
            why = f"{peer.name} is worker {peer.rank} with heads {heads}, not {leg.rank} with {leg.heads}"
            self.fail(load, FailureReason.PROTOCOL, why, now)
            return
        if load.num_blocks and load.push and load.slots is None and not self._accept(load):
            return  # until its turn comes and enough slots are free, or the leg's deadline
        leg.state = LegState.OPEN
        leg.last_block, leg.deadline = now, now + self._load_timeout_s
        if load.num_blocks == 0:
            return
        leg.quarantined = load.push
        leg.peer.next_heartbeat = min(leg.peer.next_heartbeat, now + self.heartbeat_s(leg.peer))
        leg.peer.send(
            side_channel.Subscribe(
                load.transfer_id,
                load.generation,
                leg.heads,
                leg.subscriber,
                leg.num_subscribers,
                load.wish.first_block_index,
                load.slots,
            )
        )

    def _accept(self, load: Load) -> bool:
        """Gives a load that is to be pushed its slots, the oldest first; false if it has to wait."""
        if load.num_blocks > self._memory.num_slots:
            load.push = False  # it will never fit at once: read in parts
            return True
        self._want_slots.setdefault(load.transfer_id, load)
        if next(iter(self._want_slots.values())) is load:
            load.slots = self._memory.accept(load.wish.block_ids)
        if load.slots is not None:
            del self._want_slots[load.transfer_id]
        return load.slots is not None

    def release(self, leg: Leg) -> None:
        """Nothing more is wanted from the leg: says so once none of its blocks is in hand."""
        if (
            leg.state is LegState.RELEASED
            or leg.num_batches
            or not (leg.state is LegState.OPEN or leg.peer.ready)
        ):
            return
        leg.state = LegState.RELEASED
        if leg.complete and leg.is_last_write_over:
            leg.quarantined = False
        load = leg.load
        release = side_channel.Release(
            load.transfer_id,
            load.generation,
            leg.subscriber,
            leg.num_subscribers,
            completed=leg.complete,
        )
        self._releases.append((leg.peer, release))

    def _say_releases(self) -> None:
        for peer, release in self._releases:
            peer.send(release)
        self._releases.clear()

    def fail(self, load: Load, reason: FailureReason, error: str, now: float) -> None:
        """The outcome is known; it is reported once the load has drained."""
        if load.state is LoadState.DRAINING:
            return
        load.state, load.drain_deadline = LoadState.DRAINING, now + DRAIN_TIMEOUT_S
        load.reason, load.error = reason, error
        self._want_slots.pop(load.transfer_id, None)
        for leg in load.legs:
            self._blocks.forget(leg)

    def end(self, load: Load, now: float) -> None:
        del self._loads[load.transfer_id]
        if load.slots is not None:
            self._memory.release(load.slots)
        stats = self._context.stats
        if load.reason is not None:
            stats.count_failure(load.reason)
        else:
            stats.transfers_completed += 1
        stats.receive_seconds += now - load.started
        self._finished(load.transfer_id, load.result())

    def check_deadlines(self, now: float) -> None:
        for load in self:
            self._check_deadline(load, now)

    def _check_deadline(self, load: Load, now: float) -> None:
        if load.state is LoadState.LOADING:
            for leg in load.legs:
                if not leg.complete and now >= leg.deadline:
                    silence_s = now - leg.last_block
                    why = f"no progress from {leg.peer.name}: no block for {silence_s:.1f} s"
                    self.fail(load, FailureReason.TIMEOUT, why, now)
                    break
        elif load.state is LoadState.DRAINING and now >= load.drain_deadline:
            for leg in load.legs:
                if (
                    leg.num_batches and not leg.peer.error
                ):  # disconnecting aborts reads, and their ERR ends the load
                    why = f"reads from {leg.peer.name} did not end within {DRAIN_TIMEOUT_S:g} s"
                    leg.peer.fail(FailureReason.PEER_LOST, why)
                    load.drain_deadline = now + DRAIN_TIMEOUT_S

    # -- what a producer's worker says

    def hear(self, peer: Peer, message: TransferMessage, now: float) -> None:
        if isinstance(message, side_channel.Pending):
            self._still_pending(peer, message.transfer_ids, now)
            return
        load = self._loads.get(message.transfer_id)
        leg = (
            next((leg for leg in load.legs if leg.peer is peer), None) if load is not None else None
        )
        if load is None or leg is None:
            return  # of a load that ended
        to_all = isinstance(message, side_channel.Cancelled) and message.generation == 0
        if message.generation != load.generation and not to_all:
            return  # of an earlier load of this transfer
        match message:
            case side_channel.Publish() if (
                load.state is LoadState.LOADING and leg.state is LegState.OPEN
            ):
                self._published(leg, message, now)
            case side_channel.Released():
                leg.quarantined = False
            case side_channel.Cancelled(reason=reason):
                self.fail(
                    load, FailureReason.PRODUCER_CANCELLED, reason[:MAX_REASON_CHARACTERS], now
                )

    def _published(self, leg: Leg, message: side_channel.Publish, now: float) -> None:
        load, wish, new = leg.load, leg.load.wish, []
        if message.written and load.slots is not None and not leg.quarantined:
            why = f"{leg.peer.name} wrote blocks after it had said that it would write no more"
            self.fail(load, FailureReason.PROTOCOL, why, now)
            return
        for block in message.blocks:
            position = block.index - wish.first_block_index
            if block.index < 0 or not 0 <= block.slot < leg.peer.num_slots:
                why = f"{leg.peer.name} published block {block.index} in slot {block.slot} of {leg.peer.num_slots}"
                self.fail(load, FailureReason.PROTOCOL, why, now)
                return
            if not 0 <= position < load.num_blocks or leg.slots_there[position] >= 0:
                continue  # in the prefix cache already, past what is wanted, or known: the first publication counts
            if block.chain_hash != wish.block_hashes[position]:
                why = f"block {block.index} holds other tokens at {leg.peer.name}"
                self.fail(load, FailureReason.OTHER_PROMPT, why, now)
                return
            leg.slots_there[position] = block.slot
            leg.checksums[position] = block.checksum
            new.append(position)
        if new or (message.last and not leg.last):
            self._progress(leg, now)
        if message.last:
            leg.last = True
            if (num := leg.num_published) < load.num_blocks:
                why = f"{leg.peer.name} published {num} of {load.num_blocks} blocks asked for"
                self.fail(load, FailureReason.OTHER_PROMPT, why, now)
                return
        if message.written and load.slots is not None:
            leg.num_written += len(new)
            self._blocks.written(leg, new)
        else:
            self._blocks.read(leg, new)

    def proved(self, leg: Leg, wrong: list[int], now: float) -> None:
        """A batch was proved; blocks that differ are read once more, then given up."""
        load = leg.load
        self._progress(leg, now)
        if not wrong:
            return
        twice = [position for position in wrong if leg.reread[position]]
        if twice:
            index = load.wish.first_block_index + twice[0]
            why = f"block {index} of {leg.peer.name} differs from its checksum, twice"
            self.fail(load, FailureReason.CHECKSUM, why, now)
            return
        leg.reread[wrong] = True
        self._blocks.read(leg, wrong)

    def _still_pending(self, peer: Peer, transfer_ids: list[str], now: float) -> None:
        # Engines of both roles could wait in a ring, each for memory that the other's loads hold: there only blocks count.
        max_pending_s = MAX_PENDING_S if self._context.config.role is KVRole.CONSUMER else 0.0
        for transfer_id in transfer_ids:
            load = self._loads.get(transfer_id)
            for leg in load.legs if load is not None else ():
                if leg.peer is peer and leg.state is LegState.OPEN:
                    limit = leg.last_block + max_pending_s
                    leg.deadline = max(leg.deadline, min(now + self._load_timeout_s, limit))

    def _progress(self, leg: Leg, now: float) -> None:
        leg.last_block, leg.deadline = now, now + self._load_timeout_s
