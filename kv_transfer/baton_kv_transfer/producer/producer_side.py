"""The producer side of the connector: the ROUTER socket and the dispatch of its messages.

The connector's thread calls all methods. A consumer may send any message at any time. An invalid
message is refused or ignored, and affects only its sender.
"""

from __future__ import annotations

import logging
import math

import msgspec
import zmq

from baton_kv_transfer import side_channel
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.producer.block_writer import BlockWriter
from baton_kv_transfer.producer.sessions import Session, SessionRegistry
from baton_kv_transfer.producer.transfer_manager import DRAIN_TIMEOUT_S, TransferManager
from baton_protocol.service_key import ServiceKey, count_refused, watch_handshakes

logger = logging.getLogger(__name__)

#: Limit of messages queued for one consumer. Above this limit, the consumer is treated as lost.
MAX_QUEUED_MESSAGES = 16384
ZMQ_HEARTBEAT_MS = 5_000
#: Timeout of ZeroMQ's own probes, which find hosts that vanished without closing the connection.
#: The timeout only ends the session. The leases have ended earlier.
ZMQ_HEARTBEAT_TIMEOUT_MS = 60_000
#: A connection that has not completed ZeroMQ's handshake within this time is closed.
ZMQ_HANDSHAKE_MS = 10_000
#: After a pause of this length in this thread, heartbeats that consumers sent during the pause may
#: not have reached the socket yet.
STALL_S = 2.0
#: After a pause of STALL_S, no lease expires for this time.
STALL_GRACE_S = 0.5
#: After this time, leases expire even if the socket still has unread messages. ZeroMQ alternates
#: between the connections, so messages of every consumer were read by then.
MAX_UNREAD_S = 10.0


def open_router(address: str, service_key: ServiceKey | None) -> zmq.Socket[bytes]:
    """Return a ROUTER socket to which consumers can connect.

    Args:
        address: ZeroMQ address to bind.
        service_key: only consumers with this key can connect. None: only consumers without a key
            can connect.

    Raises:
        OSError: the address is in use, or not of this machine.
    """
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.MAXMSGSIZE, side_channel.MAX_MESSAGE_BYTES)
    # Sending to a consumer that is gone or reads nothing must fail.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    router.setsockopt(zmq.HEARTBEAT_IVL, ZMQ_HEARTBEAT_MS)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, ZMQ_HEARTBEAT_TIMEOUT_MS)
    router.setsockopt(zmq.HANDSHAKE_IVL, ZMQ_HANDSHAKE_MS)
    if service_key is not None:
        service_key.protect_server(router)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close(linger=0)
        raise OSError(
            error.errno, f"KV side channel cannot bind {address}: {error.strerror}"
        ) from error
    return router


class ProducerSide:
    """The transfers that this worker offers, and the consumers that fetch them."""

    def __init__(self, context: ConnectorContext, router: zmq.Socket[bytes]) -> None:
        """Create a producer side without transfers and sessions.

        Args:
            context: state shared with the consumer side.
            router: socket from `open_router`. The method `close` closes it.
        """
        self._router = router
        self._stats = context.stats
        self._handshakes = watch_handshakes(router) if context.service_key is not None else None
        self._unreachable: set[bytes] = set()
        self._writer = BlockWriter(context)
        #: The offered transfers. The scheduler's offers, saves and cancels go directly to them.
        self.transfers = TransferManager(context, self._writer, self._send)
        self._sessions = SessionRegistry(context)
        self._last_round = context.clock()
        #: Time at which the socket last had no unread message.
        self._last_empty = self._last_round
        #: No lease expires before this time.
        self._no_expiry_before = 0.0

    def close(self) -> None:
        if self._handshakes is not None:
            self._router.monitor(None, 0)  # ends the monitor
            self._handshakes.close()
        self._router.close(linger=0)

    def fail_push_sessions(self) -> None:
        """Fail the sessions that use push, after a fence (`Agent.fence`).

        The fence has removed the consumers' agents, so these consumers must connect again.
        """
        lost = self._sessions.fail_all("the producer cut all its peers off")
        self.transfers.drop_sessions(lost)

    # From the thread's loop

    def run_round(self, now: float) -> list[str]:
        """Carry out consumers' messages, record ended writes, post writes, end expired leases.

        Returns:
            The ids of transfers that have ended: no consumer reads their blocks any more.
        """
        if now - self._last_round > STALL_S:
            self._no_expiry_before = self._last_empty = now + STALL_GRACE_S
        self._last_round = now
        self._write_blocks()  # before messages, so that blocks of the last step are not delayed
        drained = self._receive(now)
        if drained:
            self._last_empty = now
        self._write_blocks()
        self.transfers.expose_waiting()
        self._write_blocks()
        # Leases must not end while messages of their consumers may be unread.
        if (drained or now - self._last_empty > MAX_UNREAD_S) and now >= self._no_expiry_before:
            for session in self.transfers.expire(now):
                self._cut_off(session, f"writes to it did not end within {DRAIN_TIMEOUT_S:g} s")
            for identity in self._sessions.take_silent(now):
                self._send(identity, side_channel.Pending([]))  # fails if the connection is lost
        for session in [
            one for one in self._sessions.failed if not self._writer.has_writes_to(one)
        ]:
            self._forget(session.identity, session.error)
            self._send(session.identity, side_channel.Refused(session.error))
        while self._unreachable:
            self._forget(self._unreachable.pop(), "the connection is lost")
        if self._handshakes is not None:
            self._stats.handshakes_refused += count_refused(self._handshakes)
        return self.transfers.take_finished()

    def next_deadline(self) -> float | None:
        """Return the time at which `run_round` must run even without an event.

        None means that only an event makes `run_round` necessary.
        """
        deadline = max(self.transfers.next_deadline(), self._no_expiry_before)
        return deadline if deadline < math.inf else None

    def _receive(self, now: float) -> bool:
        """Receive and carry out messages of consumers.

        Return True if the socket has no more messages, and False if the limit of messages per round
        is reached.
        """
        for _ in range(side_channel.MAX_MESSAGES_PER_ROUND):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if len(frames) != 1:
                self._refuse(identity, f"a message must have 1 frame, got {len(frames)}")
                continue
            (frame,) = frames
            if (
                len(frame) > side_channel.MAX_HANDSHAKE_BYTES
                and self._sessions.find(identity, now) is None
            ):
                self._refuse(identity, f"a message of {len(frame)} bytes before HELLO and DESCRIBE")
                continue
            try:
                message = side_channel.decode_to_producer(frame)
            except msgspec.DecodeError as error:
                self._refuse(identity, f"malformed message: {error}")
                continue
            self._handle(identity, message, now)
        return False

    def _handle(self, identity: bytes, message: side_channel.ToProducer, now: float) -> None:
        match message:
            case side_channel.Hello():
                self._forget(identity, "the consumer sent HELLO again")
                self._answer(identity, self._sessions.handle_hello(identity, message, now))
                return
            case side_channel.Describe():
                answer, lost = self._sessions.handle_describe(identity, message, now)
                self.transfers.drop_sessions(lost)
                self._answer(identity, answer)
                return
        session = self._sessions.find(identity, now)
        if session is None:
            self._refuse(identity, "HELLO and DESCRIBE must come first")
            return
        match message:
            case side_channel.Subscribe():
                self.transfers.subscribe(session, message)
            case side_channel.Release():
                self.transfers.release(session, message)
            case side_channel.Heartbeat(transfer_ids=transfer_ids):
                self.transfers.heartbeat(session, transfer_ids)

    def _write_blocks(self) -> None:
        for subscriber, blocks, error in self._writer.write_queued():
            if error and not subscriber.session.error:
                self._cut_off(subscriber.session, f"writing to the consumer failed: {error}")
            self.transfers.record_written(subscriber, blocks)

    def _cut_off(self, session: Session, reason: str) -> None:
        logger.warning("the consumer %s is disconnected: %s", session.instance_id, reason)
        self.transfers.drop_sessions(self._sessions.fail(session, reason))

    def _forget(self, identity: bytes, reason: str) -> None:
        """Remove the session of a connection, and stop publishing and writing to the consumer."""
        self.transfers.drop_sessions(self._sessions.forget(identity, reason))

    def _refuse(self, identity: bytes, reason: str) -> None:
        """Refuse an invalid message. The consumer has to connect again."""
        self._answer(identity, side_channel.Refused(reason))

    def _answer(self, identity: bytes, answer: side_channel.ToConsumer) -> None:
        if isinstance(answer, side_channel.Refused):
            self._stats.handshakes_refused += 1
            self._forget(identity, answer.reason)
        self._send(identity, answer)

    def _send(self, identity: bytes, message: side_channel.ToConsumer) -> None:
        try:
            self._router.send_multipart([identity, side_channel.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._unreachable.add(identity)
