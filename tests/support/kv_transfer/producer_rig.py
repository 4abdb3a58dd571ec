"""A producer whose clock, memory and writes a test controls, and scripted consumers.

For the tests of the producer side.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.agent import XferHandle
from baton_kv_transfer.agent.transport_agent import TransportAgent
from baton_kv_transfer.connector import BlockSave, ConnectorStats
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, RankAddress
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.producer.producer_side import ProducerSide, open_router
from baton_kv_transfer.side_channel import MemoryDescription, Publish
from baton_protocol.options.config import KVRole, KVTransferConfig
from baton_protocol.service_key import ServiceKey

LEASE_S = 10.0
NUM_BLOCKS = 16
ALL_HEADS = HeadRange(0, 4)
_serial = itertools.count()


def layout(
    first: int = 0, count: int = 4, num_blocks: int = NUM_BLOCKS, **changes: Any
) -> KVCacheLayout:
    """Return the layout of a worker with `count` of the model's 4 KV heads."""
    shape: dict[str, Any] = {"num_layers": 1, "block_size": 2, "head_dim": 4, "dtype": "float32"}
    return KVCacheLayout(
        num_blocks=num_blocks,
        num_kv_heads=count,
        first_kv_head=first,
        total_kv_heads=4,
        **(shape | changes),
    )


def chain_hash(index: int) -> bytes:
    return b"%016d" % index


def indices(messages: list[Any]) -> list[int]:
    """Return the indices of the published blocks."""
    return [
        block.index
        for message in messages
        if isinstance(message, Publish)
        for block in message.blocks
    ]


class HeldAgent(TransportAgent):
    """An agent over inproc whose posted writes wait until the test executes them.

    Posted writes fail when their peer is removed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, "inproc")
        self.held: list[XferHandle] = []
        self.states: dict[XferHandle, str] = {}
        #: Removing a peer does not end its writes.
        self.frozen = False
        #: Addresses and bytes of writes that ended in ERR: they may still arrive.
        self.underway: list[tuple[int, bytes]] = []

    def transfer(self, handle: XferHandle, notif_msg: bytes = b"") -> str:
        if self._peers.get(handle.peer) is None:
            self.states[handle] = "ERR"
        else:
            self.held.append(handle)
            self.states[handle] = "PROC"
        return self.states[handle]

    def check_xfer_state(self, handle: XferHandle) -> str:
        return self.states[handle]

    def let_go(self, index: int = 0, *, fail: bool = False) -> None:
        handle = self.held.pop(index)
        if fail:
            self._fail(handle)
        else:
            self.states[handle] = super().transfer(handle)

    def remove_remote_agent(self, agent: str) -> None:
        super().remove_remote_agent(agent)
        if not self.frozen:
            self.fail_all(agent)

    def fail_all(self, peer: str) -> None:
        for handle in [handle for handle in self.held if handle.peer == peer]:
            self.held.remove(handle)
            self._fail(handle)

    def let_failed_arrive(self) -> None:
        for address, content in self.underway:
            ctypes.memmove(address, content, len(content))
        self.underway.clear()

    def _fail(self, handle: XferHandle) -> None:
        self.states[handle] = "ERR"
        for (ours, nbytes, _), (theirs, _, _) in zip(
            handle.local.tolist(), handle.remote.tolist(), strict=True
        ):
            self.underway.append((theirs, ctypes.string_at(ours, nbytes)))


class CountedMemory(HostMemory):
    """KV memory with at most `free` free slots. It records exposed blocks and checksum calls."""

    def __init__(self, layout: KVCacheLayout) -> None:
        self.bytes = np.zeros((layout.num_blocks, layout.block_nbytes), dtype=np.uint8)
        super().__init__(self.bytes.ctypes.data, layout)
        self.free = layout.num_blocks
        self.exposed: list[int] = []
        self.sum_calls: list[tuple[int, HeadRange]] = []

    def expose(self, block_ids: Sequence[int]) -> list[int] | None:
        if len(block_ids) > self.free:
            return None
        self.free -= len(block_ids)
        self.exposed += block_ids
        return list(block_ids)

    def release(self, slots: Sequence[int]) -> None:
        self.free += len(slots)
        for slot in slots:
            self.exposed.remove(slot)

    def block_sums(self, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
        self.sum_calls.append((len(slots), heads))
        return super().block_sums(slots, heads)


class Producer:
    """The producer instance P. It does nothing until the test calls `advance()`."""

    def __init__(
        self,
        *,
        service_key: ServiceKey | None = None,
        max_inflight_bytes: int = 2**20,
        heads: HeadRange = ALL_HEADS,
    ) -> None:
        self.now = 100.0
        self.stats = ConnectorStats()
        self.finished: list[str] = []
        self.address = f"inproc://producer-{next(_serial)}"
        self.router = open_router(self.address, None)  # no authentication within a process
        self.agent = HeldAgent("P/0")
        self.memory = CountedMemory(layout(heads.first, heads.count))
        self.memory.bytes[:] = np.random.default_rng(0).integers(
            0, 255, self.memory.bytes.shape, dtype=np.uint8
        )
        self.agent.register_memory([(self.memory.base_address, self.memory.bytes.nbytes, 0, "kv")])
        config = KVTransferConfig(
            role=KVRole.PRODUCER, lease_s=LEASE_S, max_inflight_bytes=max_inflight_bytes
        )
        context = ConnectorContext(
            config,
            "P",
            "c",
            service_key,
            self.agent,
            self.memory,
            [RankAddress("127.0.0.1", 1, heads)],
            self.stats,
            lambda: self.now,
        )
        self.side = ProducerSide(context, self.router)

    def advance(self, seconds: float = 0.0) -> None:
        """Advance the clock and the producer in steps of at most 1 s."""
        while seconds > 0:
            step = min(1.0, seconds)
            self.now, seconds = self.now + step, seconds - step
            self.finished += self.side.run_round(self.now)
        self.finished += self.side.run_round(self.now)

    def offer(self, transfer_id: str = "t", peer: str = "D") -> None:
        self.side.transfers.offer(transfer_id, peer)
        self.advance()

    def cancel(self, transfer_id: str = "t") -> None:
        self.side.transfers.cancel(transfer_id)
        self.advance()

    def save(
        self, block_ids: list[int], first: int = 0, *, last: bool = False, transfer_id: str = "t"
    ) -> None:
        hashes = [chain_hash(first + row) for row in range(len(block_ids))]
        self.side.transfers.save(
            BlockSave(transfer_id, first, block_ids, hashes, 2 * (first + len(block_ids)), last)
        )
        self.advance()

    def let_writes_end(self) -> None:
        while self.agent.held:
            self.agent.let_go()
            self.advance()

    def close(self) -> None:
        self.side.close()
        self.agent.close()


class Consumer:
    """A worker of instance D that sends scripted messages."""

    def __init__(
        self,
        producer: Producer,
        *,
        instance_id: str = "D",
        rank: int = 0,
        heads: HeadRange = ALL_HEADS,
        push: bool = False,
        token: bytes = b"",
        handshake: bool = True,
    ) -> None:
        self.producer = producer
        self.instance_id = instance_id
        self.token = token
        self.push = push
        self.layout = layout(heads.first, heads.count)
        self.bytes = np.zeros((NUM_BLOCKS, self.layout.block_nbytes), dtype=np.uint8)
        self.agent = TransportAgent(f"{instance_id}/{rank}", "inproc")
        self.agent.register_memory([(self.bytes.ctypes.data, self.bytes.nbytes, 0, "kv")])
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(producer.address)
        self.nonce = auth.new_nonce()
        self.description: side_channel.Description | None = None
        if handshake:
            self.send_hello()

    def memory(self, **changes: Any) -> MemoryDescription:
        fields: dict[str, Any] = {
            "agent_metadata": self.agent.get_agent_metadata(),
            "base_address": self.bytes.ctypes.data,
            "num_slots": NUM_BLOCKS,
            "slot_nbytes": self.layout.block_nbytes,
            "mem_type": "DRAM",
            "device_id": 0,
        }
        return MemoryDescription(**(fields | changes))

    def hello(self, **changes: Any) -> side_channel.Hello:
        fields: dict[str, Any] = {
            "version": side_channel.VERSION,
            "compatibility_hash": "c",
            "instance_id": self.instance_id,
            "peer_instance_id": "P",
            "nonce": self.nonce,
        }
        return side_channel.Hello(**(fields | changes))

    def proof(self, welcome: side_channel.Welcome, role: str = auth.CONSUMER) -> bytes:
        ids = {"consumer_id": self.instance_id, "producer_id": "P"}
        return auth.compute_proof(
            self.token, role, consumer_nonce=self.nonce, producer_nonce=welcome.nonce, **ids
        )

    def send_hello(self) -> None:
        (welcome,) = (
            message
            for message in self.send(self.hello())
            if isinstance(message, side_channel.Welcome)
        )
        assert welcome.proof == self.proof(welcome, auth.PRODUCER)
        memory = self.memory() if self.push else None
        (description,) = self.send(side_channel.Describe(self.proof(welcome), self.layout, memory))
        assert isinstance(description, side_channel.Description)
        self.description = description

    def send(self, *messages: side_channel.ToProducer | bytes) -> list[Any]:
        """Send messages, and let the producer process them. Return the producer's messages."""
        for message in messages:
            self.socket.send(
                message if isinstance(message, bytes) else side_channel.encode(message)
            )
        self.producer.advance()
        return self.received()

    def received(self) -> list[Any]:
        """Return the producer's new messages, except its probes of the connection."""
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(side_channel.decode_to_consumer(self.socket.recv(zmq.NOBLOCK)))
        return [message for message in messages if message != side_channel.Pending([])]

    def notified(self) -> list[side_channel.Publish]:
        """Return the new notifications of completed writes."""
        messages = self.agent.get_new_notifs().get("P/0", [])
        return [side_channel.decode_notification(message) for message in messages]

    def subscribe(
        self,
        transfer_id: str = "t",
        generation: int = 7,
        *,
        first: int = 0,
        slots: list[int] | None = None,
        worker: int = 0,
        of: int = 1,
        heads: HeadRange | None = None,
    ) -> list[Any]:
        heads = heads or self.layout.heads.overlap(self.producer.memory.layout.heads)
        return self.send(
            side_channel.Subscribe(transfer_id, generation, heads, worker, of, first, slots)
        )

    def release(
        self, transfer_id: str = "t", generation: int = 7, *, worker: int = 0, of: int = 1
    ) -> list[Any]:
        return self.send(side_channel.Release(transfer_id, generation, worker, of, completed=True))

    def heartbeat(self, *transfer_ids: str) -> list[Any]:
        return self.send(side_channel.Heartbeat(list(transfer_ids or ["t"])))

    def close(self) -> None:
        self.socket.close()
        self.agent.close()
