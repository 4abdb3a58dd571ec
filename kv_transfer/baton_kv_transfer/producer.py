"""The producer's half of the connector: offers, published blocks, leases. Lives on the connector's thread, owns the ROUTER.

A transfer begins with the scheduler's offer and ends, exactly once, in `finished`: the consumer released it, or it was
cancelled and the consumer knows (or never came), or the lease ran out. Until then its blocks belong to the transfer.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from baton_kv_transfer import checksum, side_channel
from baton_kv_transfer.connector import BlockSave, ConnectorStats, KVCacheLayout
from baton_kv_transfer.side_channel import PublishedBlock

logger = logging.getLogger(__name__)

MAX_SESSIONS = 4096
"""Handshaken consumers remembered; the longest silent one goes first and has to greet again."""
MAX_ENDED = 4096
"""Ended transfers remembered, to answer late subscriptions at once."""
MAX_EARLY = 16384
"""Subscriptions held whose offers have not come."""
MAX_MESSAGES_PER_ROUND = 1024


@dataclass(slots=True)
class _Offer:
    """A transfer the scheduler accepted."""

    peer_instance_id: str
    deadline: float
    identity: bytes = b""
    """ZMQ identity of the subscriber; empty until it came."""
    published: list[PublishedBlock] = field(default_factory=list)
    last: bool = False
    cancelled: bool = False

    @property
    def lease_end(self) -> float | None:
        """None: the request still waits for its turn, no block is kept for the consumer."""
        return self.deadline if self.published or self.cancelled else None


@dataclass(slots=True)
class _Early:
    """SUBSCRIBE or RELEASE of a transfer that is not offered yet."""

    released: bool
    deadline: float


class ProducerSide:
    def __init__(
        self,
        router: zmq.Socket[bytes],
        *,
        instance_id: str,
        compatibility_hash: str,
        lease_s: float,
        stats: ConnectorStats,
        finished: Callable[[str], None],
    ) -> None:
        self._router = router
        self._instance_id = instance_id
        self._compatibility_hash = compatibility_hash
        self._lease_s = lease_s
        self._stats = stats
        self._finished = finished
        self._sessions: OrderedDict[bytes, str] = OrderedDict()  # identity -> instance id, longest silent first
        self._offers: dict[str, _Offer] = {}
        self._early: dict[tuple[str, bytes], _Early] = {}  # by transfer id and ZMQ identity
        self._ended: OrderedDict[str, str] = OrderedDict()  # transfer id -> why
        self._layout: KVCacheLayout | None = None
        self._base_address = 0
        self._agent_metadata = b""

    def serve(self, base_address: int, layout: KVCacheLayout, agent_metadata: bytes) -> None:
        self._base_address, self._layout, self._agent_metadata = base_address, layout, agent_metadata

    # -- from the scheduler

    def offer(self, transfer_id: str, peer_instance_id: str) -> None:
        if transfer_id in self._offers:
            logger.warning("transfer %s was offered twice; the first offer stands", transfer_id)
            return
        offer = _Offer(peer_instance_id, time.monotonic() + self._lease_s)
        self._offers[transfer_id] = offer
        for key in [key for key in self._early if key[0] == transfer_id]:
            early = self._early.pop(key)
            if self._admit(transfer_id, offer, key[1]) and early.released:
                self._end(transfer_id, "released")
                return

    def save(self, save: BlockSave) -> None:
        """Publishes a step's blocks. A transfer that ended meanwhile takes no more."""
        offer, layout = self._offers.get(save.transfer_id), self._layout
        if offer is None or offer.cancelled or layout is None:
            return
        blocks = []
        for offset, (block_id, chain_hash) in enumerate(zip(save.block_ids, save.block_hashes, strict=True)):
            word_sum = checksum.block_sum(self._base_address + block_id * layout.block_nbytes, layout.block_nbytes)
            proof = checksum.bind(word_sum, save.transfer_id, chain_hash)
            blocks.append(PublishedBlock(save.first_block_index + offset, block_id, chain_hash, proof))
        offer.published += blocks
        offer.last = offer.last or save.last
        if offer.identity:
            self._publish(save.transfer_id, offer, blocks)
        else:
            offer.deadline = time.monotonic() + self._lease_s

    def cancel(self, transfer_id: str) -> None:
        offer = self._offers.get(transfer_id)
        if offer is None or offer.cancelled:
            return
        if not offer.identity:
            self._end(transfer_id, "cancelled by the producer")
            return
        offer.cancelled = True
        offer.deadline = time.monotonic() + self._lease_s
        self._send(offer.identity, side_channel.Cancelled(transfer_id, "cancelled by the producer"))

    def end_all(self, reason: str) -> None:
        for transfer_id in list(self._offers):
            self._end(transfer_id, reason)

    def close(self) -> None:
        self._router.close(linger=0)

    # -- from the consumers

    def receive(self) -> bool:
        """Handles what consumers sent; false if more may be waiting (leases must not expire before it is read)."""
        for _ in range(MAX_MESSAGES_PER_ROUND):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                message = side_channel.decode_to_producer(b"".join(frames))
            except msgspec.DecodeError as error:
                self._refuse(identity, f"malformed message: {error}")
                continue
            self._handle(identity, message)
        return False

    def expire(self, now: float) -> None:
        """Ends what nobody gave a sign for. Call only after `receive` drained the socket."""
        for transfer_id, offer in list(self._offers.items()):
            if offer.lease_end is not None and now >= offer.lease_end:
                self._stats.leases_expired += 1
                logger.warning("transfer %s: no sign of its consumer for %.1f s", transfer_id, self._lease_s)
                if offer.identity:
                    self._send(offer.identity, side_channel.Cancelled(transfer_id, "the producer's lease expired"))
                self._end(transfer_id, "its lease expired")
        for (transfer_id, identity), early in list(self._early.items()):
            if now >= early.deadline:
                del self._early[transfer_id, identity]
                if not early.released:
                    reason = f"transfer {transfer_id} was not offered within {self._lease_s:g} s"
                    self._send(identity, side_channel.Cancelled(transfer_id, reason))

    def next_deadline(self) -> float | None:
        deadlines = [offer.lease_end for offer in self._offers.values() if offer.lease_end is not None]
        deadlines += [early.deadline for early in self._early.values()]
        return min(deadlines, default=None)

    def _handle(self, identity: bytes, message: side_channel.ToProducer) -> None:
        if isinstance(message, side_channel.Hello):
            self._greet(identity, message)
            return
        instance_id = self._sessions.get(identity)
        if instance_id is None:
            self._refuse(identity, "HELLO must come first")
            return
        self._sessions.move_to_end(identity)
        match message:
            case side_channel.Describe(layout=layout):
                self._describe(identity, layout)
            case side_channel.Subscribe(transfer_id=transfer_id):
                self._take_up(transfer_id, identity, released=False)
            case side_channel.Release(transfer_id=transfer_id):
                self._take_up(transfer_id, identity, released=True)
            case side_channel.Heartbeat(transfer_ids=transfer_ids):
                self._extend(identity, transfer_ids)

    def _greet(self, identity: bytes, hello: side_channel.Hello) -> None:
        self._sessions.pop(identity, None)
        ours = (side_channel.VERSION, self._compatibility_hash, self._instance_id)
        theirs = (hello.version, hello.compatibility_hash, hello.peer_instance_id)
        names = (
            "side channel version",
            "compatibility hash (of checkpoint, dtype, quantization, block size)",
            "instance id",
        )
        for name, mine, other in zip(names, ours, theirs, strict=True):
            if mine != other:
                self._refuse(identity, f"{name} differs: {mine} at the producer, {other} at the consumer")
                return
        self._sessions[identity] = hello.instance_id
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        self._send(identity, side_channel.Welcome(*ours))

    def _describe(self, identity: bytes, theirs: KVCacheLayout) -> None:
        if self._layout is None:
            self._refuse(identity, "the producer has no KV memory registered yet: try again")
        elif mismatch := side_channel.layout_mismatch(self._layout, theirs):
            self._refuse(identity, mismatch)
        else:
            description = side_channel.Description(
                self._layout, self._base_address, self._agent_metadata, self._lease_s
            )
            self._send(identity, description)

    def _take_up(self, transfer_id: str, identity: bytes, *, released: bool) -> None:
        """SUBSCRIBE or RELEASE."""
        offer = self._offers.get(transfer_id)
        if offer is not None:
            if self._admit(transfer_id, offer, identity) and released:
                self._end(transfer_id, "released")
        elif transfer_id in self._ended:
            if not released:
                reason = f"transfer {transfer_id} has ended: {self._ended[transfer_id]}"
                self._send(identity, side_channel.Cancelled(transfer_id, reason))
        elif len(self._early) >= MAX_EARLY:
            reason = f"{MAX_EARLY} subscriptions wait for their offers already: retry later"
            self._send(identity, side_channel.Cancelled(transfer_id, reason))
        else:
            self._early[transfer_id, identity] = _Early(released, time.monotonic() + self._lease_s)

    def _admit(self, transfer_id: str, offer: _Offer, identity: bytes) -> bool:
        """Lets the offered peer in, and nobody else; a first subscription gets what is published so far."""
        instance_id = self._sessions.get(identity, "")
        if instance_id != offer.peer_instance_id:
            reason = f"transfer {transfer_id} is offered to instance {offer.peer_instance_id}, not to {instance_id}"
            self._send(identity, side_channel.Cancelled(transfer_id, reason))
            return False
        offer.deadline = time.monotonic() + self._lease_s
        if offer.identity != identity:
            offer.identity = identity
            if offer.published:
                self._publish(transfer_id, offer, offer.published)
        return True

    def _extend(self, identity: bytes, transfer_ids: list[str]) -> None:
        """HEARTBEAT. A request may wait in a busy engine's queue for long: the consumer is told that it is not lost."""
        deadline = time.monotonic() + self._lease_s
        pending = []
        for transfer_id in transfer_ids:
            offer, early = self._offers.get(transfer_id), self._early.get((transfer_id, identity))
            if offer is not None and offer.identity == identity and not offer.cancelled:
                offer.deadline = deadline
                if not offer.last:
                    pending.append(transfer_id)
            if early is not None:
                early.deadline = deadline
        if pending:
            self._send(identity, side_channel.Pending(pending))

    def _publish(self, transfer_id: str, offer: _Offer, blocks: list[PublishedBlock]) -> None:
        self._send(offer.identity, side_channel.Publish(transfer_id, blocks, offer.last))
        self._stats.blocks_sent += len(blocks)

    def _end(self, transfer_id: str, reason: str) -> None:
        del self._offers[transfer_id]
        self._ended[transfer_id] = reason
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._finished(transfer_id)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._send(identity, side_channel.Refused(reason))

    def _send(self, identity: bytes, message: side_channel.ToConsumer) -> None:
        self._router.send_multipart([identity, side_channel.encode(message)], zmq.NOBLOCK)
