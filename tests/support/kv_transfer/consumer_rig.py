"""A consumer whose clock and transfers a test controls, and scripted producers.

For the tests of the consumer side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.agent import INIT_AGENT, DlistHandle, XferHandle
from baton_kv_transfer.agent.transport_agent import TransportAgent
from baton_kv_transfer.connector import ConnectorStats, LoadRequest, LoadResult
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.consumer.consumer_side import ConsumerSide
from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, RankAddress
from baton_kv_transfer.memory.slot_memory import HostMemory, SlotMemory, slot_rows
from baton_kv_transfer.memory.staged_memory import StagedMemory
from baton_kv_transfer.side_channel import MemoryDescription, Publish, PublishedBlock, Subscribe
from baton_kv_transfer.transports.transfer import Post
from baton_protocol.options.config import KVRole, KVTransferConfig
from baton_protocol.service_key import ServiceKey

HOST = "127.0.0.1"
WAIT_MS = 60_000
KEY = ServiceKey(b"the key of these producers")
NUM_HEADS = 4
ALL_HEADS = HeadRange(0, NUM_HEADS)
WHOLE = KVCacheLayout(
    num_blocks=24, num_kv_heads=NUM_HEADS, num_layers=1, block_size=2, head_dim=4, dtype="float32"
)
HEAD_NBYTES = WHOLE.head_nbytes
BLOCK_NBYTES = WHOLE.block_nbytes


def layout_of(heads: HeadRange) -> KVCacheLayout:
    """Return the layout of a worker that has the KV heads `heads` of the model."""
    return KVCacheLayout(
        num_blocks=WHOLE.num_blocks,
        num_kv_heads=heads.count,
        num_layers=1,
        block_size=2,
        head_dim=4,
        dtype="float32",
        first_kv_head=heads.first,
        total_kv_heads=NUM_HEADS,
    )


def chain_hash(transfer_id: str, index: int) -> bytes:
    return f"{transfer_id}/{index}".encode().ljust(16, b".")


def content(transfer_id: str, index: int) -> np.ndarray:
    """Return the content of block `index`: uint8 [heads of the model, bytes of a head]."""
    seed = int.from_bytes(chain_hash(transfer_id, index), "little")
    return np.random.default_rng(seed).integers(0, 256, (NUM_HEADS, HEAD_NBYTES), dtype=np.uint8)


class HeldAgent(TransportAgent):
    """An agent over inproc. While `hold` is True, transfers wait until the test calls `land()`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "inproc")
        self.hold = False
        #: Removing a peer does not end its transfers.
        self.ignores_removal = False
        self.held: list[Any] = []
        self.num_fences = 0

    def transfer(self, handle: XferHandle, notif_msg: bytes = b"") -> str:
        if not self.hold:
            return super().transfer(handle, notif_msg)
        handle.post = Post()
        self.held.append(handle)
        return "PROC"

    def land(self, handle: Any) -> None:
        self.held.remove(handle)
        handle.post = None
        super().transfer(handle)

    def break_off(self, handle: Any) -> None:
        self.held.remove(handle)
        handle.post.end("broken off")

    def remove_remote_agent(self, agent: str) -> None:
        if not self.ignores_removal:
            for handle in [handle for handle in self.held if handle.peer == agent]:
                self.break_off(handle)
        super().remove_remote_agent(agent)

    def fence(self) -> None:
        self.num_fences += 1
        for handle in list(self.held):
            self.break_off(handle)
        super().fence()


class Worker:
    """A scripted worker of a producer, with a ROUTER socket, memory and an agent."""

    def __init__(
        self,
        instance_id: str = "P",
        rank: int = 0,
        heads: HeadRange = ALL_HEADS,
        port: int = 0,
        service_key: ServiceKey | None = KEY,
    ) -> None:
        self.instance_id, self.rank = instance_id, rank
        self.layout = layout_of(heads)
        self.blocks = np.zeros((WHOLE.num_blocks, self.layout.block_nbytes), dtype=np.uint8)
        self.memory = HostMemory(self.blocks.ctypes.data, self.layout)
        self.agent = TransportAgent(f"{instance_id}/{rank}", "inproc")
        self.agent.register_memory([(self.blocks.ctypes.data, self.blocks.nbytes, 0, "kv")])
        self.router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        if service_key is not None:
            service_key.protect_server(self.router)
        self.router.bind(f"tcp://{HOST}:{port or '*'}")
        self.port = int(self.router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self.identity = b""
        self.lease_s = 30.0
        self.token = auth.derive_token(KEY)
        self.ranks = [RankAddress(HOST, self.port, heads)]
        #: The consumer's memory.
        self.described: MemoryDescription | None = None
        self._free = list(range(WHOLE.num_blocks))

    def hang_up(self) -> None:
        """Close the connections. Afterwards another worker may use the address."""
        if not self.router.closed:
            monitor: zmq.Socket[bytes] = self.router.get_monitor_socket(zmq.EVENT_CLOSED)
            self.router.unbind(f"tcp://{HOST}:{self.port}")
            assert monitor.poll(WAIT_MS)
            self.router.disable_monitor()
            monitor.close(linger=0)
            self.router.close(linger=0)

    def close(self) -> None:
        self.hang_up()
        self.agent.close()

    # The side channel

    def receive(self, kind: type | None = None) -> Any:
        """Return the next message of type `kind`. Drop earlier messages of other types."""
        while True:
            assert self.router.poll(WAIT_MS), f"the consumer sent no {kind and kind.__name__}"
            identity, frame = self.router.recv_multipart()
            message = side_channel.decode_to_producer(frame)
            if isinstance(message, side_channel.Hello):
                self.identity = identity
            elif identity != self.identity:
                continue  # the message is from a closed connection
            if kind is None or isinstance(message, kind):
                return message

    def poll(self) -> list[Any]:
        """Return the messages that have arrived, except heartbeats."""
        messages = []
        while self.router.poll(0):
            _, frame = self.router.recv_multipart()
            messages.append(side_channel.decode_to_producer(frame))
        return [message for message in messages if not isinstance(message, side_channel.Heartbeat)]

    def send(self, message: side_channel.ToConsumer) -> None:
        self.router.send_multipart([self.identity, side_channel.encode(message)])

    def welcome(self, hello: side_channel.Hello, **changes: Any) -> side_channel.Welcome:
        nonce = auth.new_nonce()
        proof = auth.compute_proof(
            self.token,
            auth.PRODUCER,
            consumer_nonce=hello.nonce,
            producer_nonce=nonce,
            consumer_id=hello.instance_id,
            producer_id=self.instance_id,
        )
        fields: dict[str, Any] = {
            "version": side_channel.VERSION,
            "compatibility_hash": "c",
            "instance_id": self.instance_id,
            "nonce": nonce,
            "proof": proof,
        }
        return side_channel.Welcome(**(fields | changes))

    def description(self, **changes: Any) -> side_channel.Description:
        """Return this worker's Description.

        Args:
            changes: new values of fields of the Description or of its MemoryDescription.
        """
        memory: dict[str, Any] = {
            "agent_metadata": self.agent.get_agent_metadata(),
            "base_address": self.memory.base_address,
            "num_slots": self.memory.num_slots,
            "slot_nbytes": self.layout.block_nbytes,
            "mem_type": "DRAM",
            "device_id": 0,
        }
        memory = {name: changes.pop(name, value) for name, value in memory.items()}
        fields: dict[str, Any] = {
            "layout": self.layout,
            "memory": MemoryDescription(**memory),
            "lease_s": self.lease_s,
            "ranks": self.ranks,
        }
        return side_channel.Description(**(fields | changes))

    # Blocks

    def fill(self, transfer_id: str, indices: Sequence[int]) -> list[int]:
        """Write the content of the transfer's blocks `indices` into slots. Return the slots."""
        slots = [self._free.pop(0) for _ in indices]
        heads = self.layout.heads
        for index, slot in zip(indices, slots, strict=True):
            self.blocks[slot] = content(transfer_id, index)[heads.first : heads.end].reshape(-1)
        self._free += slots  # reused after all others
        return slots

    def published(
        self,
        subscribe: Subscribe,
        indices: Sequence[int],
        last: bool = False,
        written: bool = False,
    ) -> Publish:
        """Write the blocks `indices` of a transfer, and return a correct PUBLISH of them."""
        slots = self.fill(subscribe.transfer_id, indices)
        sums = self.memory.block_sums(slots, subscribe.heads).tolist()
        blocks = []
        for index, slot, word_sum in zip(indices, slots, sums, strict=True):
            proof = checksum.bind(
                word_sum,
                transfer_id=subscribe.transfer_id,
                generation=subscribe.generation,
                chain_hash=chain_hash(subscribe.transfer_id, index),
                heads=subscribe.heads,
            )
            blocks.append(
                PublishedBlock(index, slot, chain_hash(subscribe.transfer_id, index), proof)
            )
        return Publish(subscribe.transfer_id, subscribe.generation, blocks, last, written)

    def write(
        self,
        subscribe: Subscribe,
        blocks: Sequence[PublishedBlock],
        consumer_layout: KVCacheLayout,
        notification: bytes | Publish = b"",
    ) -> str:
        """Push published blocks into the consumer's memory. Return the state of the transfer."""
        ours, theirs = self.push_lists(subscribe.heads, consumer_layout)
        slots = [
            subscribe.push_slots[block.index - subscribe.first_block_index] for block in blocks
        ]
        handle = self.agent.make_prepped_xfer(
            "WRITE", ours, [block.slot for block in blocks], theirs, slots
        )
        notif = (
            side_channel.encode(notification) if isinstance(notification, Publish) else notification
        )
        return self.agent.transfer(handle, notif)

    def push_lists(
        self, heads: HeadRange, consumer_layout: KVCacheLayout
    ) -> tuple[DlistHandle, DlistHandle]:
        name = self.agent.add_remote_agent(self.described.agent_metadata)
        here = slot_rows(
            self.memory.base_address, self.memory.num_slots, self.layout, heads, device_id=0
        )
        there = slot_rows(
            self.described.base_address,
            self.described.num_slots,
            consumer_layout,
            heads,
            device_id=0,
        )
        return self.agent.prep_xfer_dlist(INIT_AGENT, here), self.agent.prep_xfer_dlist(name, there)


@dataclasses.dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """The worker of a consumer. It does nothing until the test calls `advance()`."""

    def __init__(
        self,
        *,
        push: bool = False,
        heads: HeadRange = ALL_HEADS,
        engine: Sequence[HeadRange] = (),
        memory: Callable[[np.ndarray, KVCacheLayout], SlotMemory] | None = None,
        max_inflight_bytes: int = 2**20,
        on_result: Callable[[str, LoadResult], None] = lambda transfer_id, result: None,
    ) -> None:
        """Create a worker.

        Args:
            engine: KV heads of each worker of the consumer; empty for this worker only.
            memory: makes the memory from blocks [num_blocks, bytes]; None for HostMemory.
        """
        self.clock = Clock()
        self.layout = layout_of(heads)
        self.blocks = np.full((WHOLE.num_blocks, self.layout.block_nbytes), 0xEE, dtype=np.uint8)
        self.memory = (
            memory(self.blocks, self.layout)
            if memory
            else HostMemory(self.blocks.ctypes.data, self.layout)
        )
        self.agent = HeldAgent("D/0")
        self.agent.register_memory(
            [(self.memory.base_address, self.memory.num_slots * self.layout.block_nbytes, 0, "")]
        )
        self.stats = ConnectorStats()
        self.results: dict[str, LoadResult] = {}
        #: Number of the agent's fences at each notification of a fence.
        self.fenced: list[int] = []
        self.on_result = on_result
        self.requests: dict[str, LoadRequest] = {}
        config = KVTransferConfig(
            role=KVRole.CONSUMER,
            mode="push" if push else "pull",
            max_inflight_bytes=max_inflight_bytes,
            load_timeout_s=10.0,
        )
        self.context = ConnectorContext(
            config,
            "D",
            "c",
            KEY,
            self.agent,
            self.memory,
            [RankAddress("", 0, one) for one in engine or [self.layout.heads]],
            self.stats,
            self.clock,
        )
        self.consumer = ConsumerSide(self.context)

    def close(self) -> None:
        self.consumer.close()
        self.agent.close()

    def begin(
        self,
        transfer_id: str,
        worker: Worker,
        block_ids: Sequence[int],
        first: int = 0,
        host: str = HOST,
    ) -> None:
        hashes = [chain_hash(transfer_id, first + position) for position in range(len(block_ids))]
        request = LoadRequest(
            transfer_id,
            host,
            worker.port,
            worker.instance_id,
            first,
            list(block_ids),
            hashes,
        )
        self.requests[transfer_id] = request
        self.consumer.begin(request)

    def advance(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        for transfer_id, result in self.consumer.run_round(self.clock.now):
            self._finish(transfer_id, result)
        if self.consumer.take_fence():
            self.fenced.append(self.agent.num_fences)

    def receive(self) -> None:
        """Wait for a message or a lost connection, and process it."""
        poller = zmq.Poller()
        for peer in self.consumer.peers():
            poller.register(peer.socket, zmq.POLLIN)
            poller.register(peer.monitor, zmq.POLLIN)
        assert poller.poll(WAIT_MS), "nothing arrived at the consumer"
        self.advance()

    def deliver(self, worker: Worker, message: side_channel.ToConsumer) -> None:
        """Send a message from `worker`, wait until it has arrived, and process it."""
        worker.send(message)
        sockets = [
            peer.socket for peer in self.consumer.peers() if peer.name.endswith(f":{worker.port}")
        ]
        assert sockets[-1].poll(WAIT_MS), f"{type(message).__name__} did not arrive"
        self.advance()

    def handshake(self, worker: Worker) -> None:
        self.deliver(worker, worker.welcome(worker.receive(side_channel.Hello)))
        worker.described = worker.receive(side_channel.Describe).memory
        self.deliver(worker, worker.description())

    def subscribed(
        self, transfer_id: str, worker: Worker, block_ids: Sequence[int], first: int = 0
    ) -> Subscribe:
        """Begin a load from `worker`, with a handshake if needed. Return the SUBSCRIBE."""
        is_connected = any(peer.is_ready for peer in self.consumer.peers())
        self.begin(transfer_id, worker, block_ids, first)
        if not is_connected:
            self.handshake(worker)
        return worker.receive(Subscribe)

    def holds(self, transfer_id: str, num_blocks: int) -> bool:
        """Return whether the first `num_blocks` blocks of a load have the right content."""
        request, heads = self.requests[transfer_id], self.layout.heads
        for position in range(num_blocks):
            whole = content(transfer_id, request.first_block_index + position)
            if (
                self.blocks[request.block_ids[position]]
                != whole[heads.first : heads.end].reshape(-1)
            ).any():
                return False
        return True

    def _finish(self, transfer_id: str, result: LoadResult) -> None:
        assert transfer_id not in self.results, f"two results of {transfer_id}"
        assert self.holds(transfer_id, result.num_valid_blocks)
        self.results[transfer_id] = result
        self.on_result(transfer_id, result)


def tensor_parallel(size: int, instance_id: str = "P") -> list[Worker]:
    """Return the workers of a producer with `size` ranks. Each worker lists all ranks."""
    count = NUM_HEADS // size
    workers = [Worker(instance_id, rank, HeadRange(rank * count, count)) for rank in range(size)]
    ranks = [RankAddress(HOST, worker.port, worker.layout.heads) for worker in workers]
    for worker in workers:
        worker.ranks = ranks
    return workers


def failures(rig: Rig) -> dict[str, int]:
    """Return the number of failed loads by reason."""
    return rig.stats.failures


class Staging:
    """Makes memory whose blocks are staged in `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def __call__(self, blocks: np.ndarray, layout: KVCacheLayout) -> StagedMemory:
        self._slots = np.zeros((self.num_slots, layout.block_nbytes), dtype=np.uint8)

        def copy_in(slots: Any, block_ids: Any, heads: HeadRange) -> None:
            first = heads.first - layout.first_kv_head
            columns = slice(first * layout.head_nbytes, (first + heads.count) * layout.head_nbytes)
            blocks[list(block_ids), columns] = self._slots[list(slots), columns]

        self.memory = StagedMemory(
            self._slots.ctypes.data,
            self.num_slots,
            layout,
            copy_out=lambda *_: None,
            copy_in=copy_in,
        )
        return self.memory
