"""A connection to one worker of a producer: the side channel, the handshake, the worker's memory.

    HELLO_SENT     HELLO was sent
    AUTHENTICATED  WELCOME had the right hash and proof; DESCRIBE was sent
    READY          DESCRIPTION was valid; transfers may begin
    (lost)         `error` is set: the worker refused, was silent, disconnected, or sent an invalid
                   message. This state is final.

A peer is kept for later transfers, and a lost peer does not connect again. A restarted producer is
another peer, even at the same address, because its instance id is new.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.agent import DlistHandle
from baton_kv_transfer.connector import FailureReason
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.memory.layout import (
    HeadRange,
    RankAddress,
    explain_layout_mismatch,
)
from baton_kv_transfer.side_channel import MemoryDescription
from baton_kv_transfer.transports.transfer import TransportError
from baton_protocol.service_key import HANDSHAKE_FAILED, ServiceKey, why_handshake_failed

#: A shorter lease would end before heartbeats can extend it.
MIN_LEASE_S = 0.05
#: Longer texts from a peer are shortened in errors and logs.
MAX_REASON_CHARACTERS = 500
#: Interval of ZeroMQ's own probes, which find hosts that vanished without closing the connection.
ZMQ_HEARTBEAT_MS = 2_000
ZMQ_HEARTBEAT_TIMEOUT_MS = 10_000


TransferMessage = (
    side_channel.Publish | side_channel.Pending | side_channel.Released | side_channel.Cancelled
)


class PeerState(enum.Enum):
    HELLO_SENT = enum.auto()
    AUTHENTICATED = enum.auto()
    READY = enum.auto()


def open_dealer(
    address: str, service_key: ServiceKey | None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Begin to connect to a producer. Return a DEALER socket, and the monitor of its connection.

    Args:
        address: ZeroMQ address of the producer's worker.
        service_key: the key of this engine's service; None: the producer must have no key.

    Raises:
        zmq.ZMQError: the address is invalid, or the limit of open sockets is reached.
    """
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 1000)  # a RELEASE sent before closing still goes out
    dealer.setsockopt(zmq.SNDHWM, 0)
    # A lost connection is a lost peer. A new connection needs another handshake.
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(side_channel.HANDSHAKE_TIMEOUT_S * 1000))
    dealer.setsockopt(zmq.HEARTBEAT_IVL, ZMQ_HEARTBEAT_MS)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, ZMQ_HEARTBEAT_TIMEOUT_MS)
    dealer.setsockopt(zmq.MAXMSGSIZE, side_channel.MAX_MESSAGE_BYTES)
    if service_key is not None:
        service_key.protect_client(dealer)
    monitor: zmq.Socket[bytes] = dealer.get_monitor_socket(
        zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | HANDSHAKE_FAILED
    )
    try:
        dealer.connect(address)
    except zmq.ZMQError:
        _close(dealer, monitor)
        raise
    return dealer, monitor


def _close(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    dealer.disable_monitor()
    monitor.close(linger=0)
    dealer.close()


class Peer:
    """A connection to one worker of a producer."""

    def __init__(
        self,
        context: ConnectorContext,
        push_memory: MemoryDescription | None,
        *,
        host: str,
        port: int,
        peer_instance_id: str,
        now: float,
    ) -> None:
        """Connect in the background and send HELLO.

        Args:
            context: state that both sides of the connector share.
            push_memory: this worker's memory, to which the producer writes; None with pull.
            host: address of the side channel.
            port: port of the side channel.
            peer_instance_id: instance id that the producer's engine must have.
            now: the current time.

        Raises:
            zmq.ZMQError: host and port do not form an address, or the limit of open sockets is
                reached.
        """
        self.name = f"{peer_instance_id} at {host}:{port}"
        self.error = ""
        #: Kind of the error, for metrics.
        self.reason = FailureReason.PEER_LOST
        #: The shared heads in each slot of the peer's memory. None before READY, and if the peer
        #: has no shared head.
        self.slot_descs: DlistHandle | None = None
        self.num_slots = 0
        #: Rank of the peer in its engine; -1 before READY.
        self.rank = -1
        #: All workers of the peer's engine, in rank order.
        self.ranks: list[RankAddress] = []
        #: How long the peer keeps blocks without a message of this engine, in seconds.
        self.lease_s = 0.0
        self.next_heartbeat = now
        self.handshake_deadline = now + side_channel.HANDSHAKE_TIMEOUT_S
        self._state = PeerState.HELLO_SENT
        self._address = (host, port)
        self._context = context
        self._push_memory = push_memory
        self._agent = context.agent
        #: Name of the peer's transfer agent; empty before READY.
        self.agent_name = ""
        self._token = auth.derive_token(context.service_key)
        self.peer_instance_id = peer_instance_id
        self._nonce = auth.new_nonce()
        self.socket, self.monitor = open_dealer(f"tcp://{host}:{port}", context.service_key)
        self.send(
            side_channel.Hello(
                side_channel.VERSION,
                context.compatibility_hash,
                context.instance_id,
                peer_instance_id,
                self._nonce,
            )
        )

    @property
    def is_ready(self) -> bool:
        return self._state is PeerState.READY and not self.error

    @property
    def own_heads(self) -> HeadRange:
        """KV heads of the one worker to which this connection leads. Valid once `rank` is set."""
        return self.ranks[self.rank].heads

    def send(self, message: side_channel.ToProducer) -> None:
        """Queue a message to the peer. Do nothing if the peer is lost."""
        if self.error:
            return
        try:
            self.socket.send(side_channel.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # not connected. Before WELCOME the monitor reports the reason.
            if self._state is not PeerState.HELLO_SENT:
                self.fail(FailureReason.PEER_LOST, f"connection to {self.name} lost")

    def fail(self, reason: FailureReason, error: str) -> None:
        """Mark the peer as lost. If the peer is lost already, keep the first error."""
        if not self.error:
            self.reason, self.error = reason, error[:MAX_REASON_CHARACTERS]

    def receive(self, now: float) -> list[TransferMessage]:
        """Receive messages: do the handshake, and return the messages about transfers.

        Mark the peer as lost if it refused, disconnected, sent an invalid message, or did not
        complete the handshake in time.
        """
        messages: list[TransferMessage] = []
        for _ in range(side_channel.MAX_MESSAGES_PER_ROUND):
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frame) > side_channel.MAX_HANDSHAKE_BYTES and not self.is_ready:
                self.fail(
                    FailureReason.PROTOCOL, f"{self.name} sent {len(frame)} bytes in the handshake"
                )
                break
            try:
                message = side_channel.decode_to_consumer(frame)
            except msgspec.DecodeError as error:
                self.fail(FailureReason.PROTOCOL, f"{self.name} sent a malformed message: {error}")
                break
            match message:
                case side_channel.Welcome():
                    self._handle_welcome(message)
                case side_channel.Description():
                    self._handle_description(message)
                case side_channel.Refused(reason=reason, succeeded=succeeded):
                    kind = (
                        FailureReason.PEER_LOST
                        if self.is_ready or succeeded
                        else FailureReason.REFUSED
                    )
                    self.fail(kind, f"refused by {self.name}: {reason}")
                case _ if self.is_ready:
                    messages.append(message)
                case _:
                    self._out_of_order(message)
            if self.error:
                break
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor)
            if event["event"] & HANDSHAKE_FAILED:
                self._handshake_failed(event)
            state = "failed" if self._state is PeerState.HELLO_SENT else "lost"
            self.fail(FailureReason.PEER_LOST, f"connection to {self.name} {state}")
        if self._state is not PeerState.READY and now >= self.handshake_deadline:
            self.fail(
                FailureReason.TIMEOUT,
                f"no handshake with {self.name} within {side_channel.HANDSHAKE_TIMEOUT_S:g} s",
            )
        return messages

    def close(self) -> None:
        """Disconnect the peer and mark it as lost. Transfers in flight end in ERR."""
        if self.socket.closed:
            return
        self.fail(FailureReason.PEER_LOST, f"disconnected from {self.name}")
        _close(self.socket, self.monitor)
        if self.agent_name:
            self._agent.remove_remote_agent(self.agent_name)

    def _handshake_failed(self, event: Mapping[str, Any]) -> None:
        why = f"{self.name} {why_handshake_failed(event, self._context.service_key)}"
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self.fail(FailureReason.PEER_LOST, why)
        else:
            self._refuse(why)

    def _handle_welcome(self, welcome: side_channel.Welcome) -> None:
        if self._state is not PeerState.HELLO_SENT:
            self._out_of_order(welcome)
            return
        for name, ours, theirs in (
            ("side channel version", side_channel.VERSION, welcome.version),
            (
                "compatibility hash (of checkpoint, dtype and quantization)",
                self._context.compatibility_hash,
                welcome.compatibility_hash,
            ),
            ("instance id", self.peer_instance_id, welcome.instance_id),
        ):
            if ours != theirs:
                self._refuse(f"{name} differs: {theirs} at {self.name}, {ours} expected here")
                return
        if not auth.verify_proof(self._proof(auth.PRODUCER, welcome.nonce), welcome.proof):
            self._refuse(
                f"{self.name} has another token: service_key_file must be the same for all engines"
            )
            return
        self._state = PeerState.AUTHENTICATED
        layout = self._context.memory.layout
        self.send(
            side_channel.Describe(
                self._proof(auth.CONSUMER, welcome.nonce), layout, self._push_memory
            )
        )

    def _proof(self, role: str, producer_nonce: bytes) -> bytes:
        return auth.compute_proof(
            self._token,
            role,
            consumer_nonce=self._nonce,
            producer_nonce=producer_nonce,
            consumer_id=self._context.instance_id,
            producer_id=self.peer_instance_id,
        )

    def _handle_description(self, description: side_channel.Description) -> None:
        if self._state is not PeerState.AUTHENTICATED:
            self._out_of_order(description)
            return
        ours, theirs = self._context.memory.layout, description.layout
        if mismatch := explain_layout_mismatch(ours, theirs):
            self._refuse(mismatch)
            return
        if len(description.ranks) > ours.num_model_heads:
            self._refuse(
                f"{self.name} has {len(description.ranks)} workers for {ours.num_model_heads} KV "
                "heads: blocks of replicated heads are not exchanged"
            )
            return
        try:
            self.ranks = description.ranks or [RankAddress(*self._address, theirs.heads)]
            _check_ranks(self.ranks, ours.num_model_heads)
            if not MIN_LEASE_S <= description.lease_s < float("inf"):
                raise ValueError(f"a lease of {description.lease_s} s cannot be extended")
            self.agent_name = self._agent.add_remote_agent(description.memory.agent_metadata)
            names = [f"{self.peer_instance_id}/{rank}" for rank in range(len(self.ranks))]
            if self.agent_name not in names:
                raise ValueError(f"agent {self.agent_name} is not one of {', '.join(names)}")
            self.rank = names.index(self.agent_name)
            if self.own_heads != theirs.heads:
                raise ValueError(
                    f"{self.agent_name} has {theirs.heads}, its ranks name {self.own_heads}"
                )
            if wrong := side_channel.explain_invalid_memory(description.memory, theirs):
                raise ValueError(wrong)
            self.slot_descs = self._context.peer_slot_descs(
                self.agent_name, description.memory, theirs
            )
        except TransportError as error:  # the producer died after its DESCRIPTION
            self.fail(FailureReason.PEER_LOST, f"{self.name} cannot be reached: {error}")
            return
        except side_channel.INVALID_DESCRIPTION as error:
            self.fail(FailureReason.PROTOCOL, f"{self.name} sent an invalid DESCRIPTION: {error}")
            return
        self.num_slots, self.lease_s = description.memory.num_slots, description.lease_s
        self._state = PeerState.READY

    def _refuse(self, why: str) -> None:
        """Count a refused handshake, and mark the peer as lost."""
        self._context.stats.handshakes_refused += 1
        self.fail(FailureReason.REFUSED, why)

    def _out_of_order(self, message: side_channel.ToConsumer) -> None:
        self.fail(
            FailureReason.PROTOCOL,
            f"{self.name} sent {type(message).__name__} out of turn",
        )


def _check_ranks(ranks: list[RankAddress], num_heads: int) -> None:
    """Check that the workers together have each head of the model once, in rank order.

    Raises:
        ValueError: a head is missing, repeated or not in order.
    """
    end = 0
    for rank, worker in enumerate(ranks):
        if worker.heads.first != end or not 0 < worker.heads.count <= num_heads - end:
            raise ValueError(
                f"worker {rank} has heads {worker.heads}, the workers before it have {end} of "
                f"{num_heads}"
            )
        end = worker.heads.end
    if end != num_heads:
        raise ValueError(f"the workers in it have {end} of the model's {num_heads} KV heads")
