"""A producer as its consumer sees it: the DEALER to its side channel, the handshake, and its memory in the agent.

Kept from one transfer to the next. `error` becomes set once and for all when the handshake is refused or the peer is lost;
a producer that restarted has another instance id and is another peer.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from baton_kv_transfer import side_channel
from baton_kv_transfer.agent import Agent, DlistHandle
from baton_kv_transfer.connector import KVCacheLayout

HANDSHAKE_TIMEOUT_S = 10.0
MIN_LEASE_S = 0.05
ZMQ_HEARTBEAT_MS = 2_000
"""ZMQ's own probes between the I/O threads: finds hosts that vanished without closing the connection."""
ZMQ_HEARTBEAT_TIMEOUT_MS = 10_000


TransferMessage = side_channel.Publish | side_channel.Pending | side_channel.Cancelled


class Peer:
    def __init__(
        self,
        agent: Agent,
        *,
        host: str,
        port: int,
        peer_instance_id: str,
        instance_id: str,
        compatibility_hash: str,
        layout: KVCacheLayout,
    ) -> None:
        """Connects in the background and says HELLO.

        Raises:
            zmq.ZMQError: host and port are no address, or no more sockets can be opened.
        """
        self.name = f"{peer_instance_id} at {host}:{port}"
        self.error = ""
        self.blocks: DlistHandle | None = None
        """The peer's blocks by id, once the handshake is through."""
        self.num_blocks = 0
        self.lease_s = 0.0
        """How long the peer keeps blocks without a sign of this engine."""
        self.handshake_deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self._agent = agent
        self._agent_name = ""
        self._peer_instance_id = peer_instance_id
        self._welcomed = False
        self._compatibility_hash = compatibility_hash
        self._layout = layout
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 1000)  # what was said before closing (RELEASE) still goes out
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a lost connection is a lost peer: its successor is greeted anew
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, int(HANDSHAKE_TIMEOUT_S * 1000))
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, ZMQ_HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, ZMQ_HEARTBEAT_TIMEOUT_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, side_channel.MAX_MESSAGE_BYTES)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        try:
            self.socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError:
            self.close()
            raise
        self.send(side_channel.Hello(side_channel.VERSION, compatibility_hash, instance_id, peer_instance_id))

    @property
    def ready(self) -> bool:
        return self.blocks is not None

    def send(self, message: side_channel.ToProducer) -> None:
        try:
            self.socket.send(side_channel.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # no connection any more
            self.fail(f"connection to {self.name} lost")

    def fail(self, reason: str) -> None:
        self.error = self.error or reason

    def receive(self, now: float) -> list[TransferMessage]:
        """Messages about transfers; the handshake is handled here."""
        messages: list[TransferMessage] = []
        while not self.error:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = side_channel.decode_to_consumer(frame)
            except msgspec.DecodeError as error:
                self.fail(f"{self.name} sent a malformed message: {error}")
                break
            match message:
                case side_channel.Welcome():
                    self._check_welcome(message)
                case side_channel.Description():
                    self._learn_memory(message)
                case side_channel.Refused(reason=reason):
                    self.fail(f"refused by {self.name}: {reason}")
                case side_channel.Publish() | side_channel.Pending() | side_channel.Cancelled():
                    if self.ready:
                        messages.append(message)
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            state = "lost" if self._agent_name else "failed"
            self.fail(f"connection to {self.name} {state}")
        if not self.ready and now >= self.handshake_deadline:
            self.fail(f"no handshake with {self.name} within {HANDSHAKE_TIMEOUT_S:g} s")
        return messages

    def close(self) -> None:
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()
        if self._agent_name:
            self._agent.remove_remote_agent(self._agent_name)

    def _check_welcome(self, welcome: side_channel.Welcome) -> None:
        if (welcome.version, welcome.compatibility_hash) != (side_channel.VERSION, self._compatibility_hash):
            self.fail(
                f"{self.name} speaks version {welcome.version} with compatibility hash {welcome.compatibility_hash}, "
                f"this engine version {side_channel.VERSION} with {self._compatibility_hash}"
            )
            return
        self._welcomed = True
        self.send(side_channel.Describe(self._layout))

    def _learn_memory(self, description: side_channel.Description) -> None:
        if not self._welcomed:
            self.fail(f"{self.name} described its memory before the compatibility hash was checked")
            return
        if mismatch := side_channel.layout_mismatch(self._layout, description.layout):
            self.fail(mismatch)
            return
        nbytes = description.layout.block_nbytes
        try:
            if not description.lease_s >= MIN_LEASE_S:
                raise ValueError(f"a lease of {description.lease_s} s is too short to be extended")
            descs = np.zeros((description.layout.num_blocks, 3), dtype=np.int64)
            descs[:, 0] = description.base_address + np.arange(description.layout.num_blocks, dtype=np.int64) * nbytes
            descs[:, 1] = nbytes
            self._agent_name = self._agent.add_remote_agent(description.agent_metadata)
            self.blocks = self._agent.prep_xfer_dlist(self._agent_name, descs)
        except (ValueError, ArithmeticError, MemoryError, RecursionError, msgspec.DecodeError) as error:
            self.fail(f"{self.name} described its memory wrongly: {error}")
            return
        if self._agent_name != self._peer_instance_id:
            self.fail(f"{self.name} sent the agent metadata of {self._agent_name}")
        else:
            self.num_blocks, self.lease_s = description.layout.num_blocks, description.lease_s
