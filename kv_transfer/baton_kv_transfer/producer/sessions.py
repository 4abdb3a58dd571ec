"""The producer's consumers: their handshakes, and their memory in the agent. Lives on the connector's thread.

    HELLO_SENT   HELLO agreed with this engine; WELCOME was sent. Nothing about memory was said.
    OPEN      the token was proved and the layouts fit; DESCRIPTION was sent. TransferManager may be asked for.
    FAILED    writing to its memory failed: its agent is removed. It is refused, and forgotten, once its writes have ended.

A session is forgotten when its connection is gone, when it greets again, or when too many greeted after it; the consumer's
agent goes with the last session that uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.agent import DlistHandle
from baton_kv_transfer.context import ConnectorContext
from baton_kv_transfer.memory.kv_memory import slot_rows
from baton_kv_transfer.memory.layout import KVCacheLayout, explain_layout_mismatch
from baton_kv_transfer.side_channel import MemoryDescription

MAX_HANDSHAKES = 1024
MAX_OPEN = 4096
"""SessionRegistry remembered in each state; the longest silent one goes first and has to handle_hello again."""
MAX_ID_LENGTH = 512
MAX_SLOTS = 2**22
"""Of one consumer's memory."""
_MAX_ADDRESS = 2**63

Send = Callable[[bytes, side_channel.ToConsumer], None]
"""(ZMQ identity, message)."""


@dataclass(slots=True, eq=False)
class Session:
    """A consumer's worker on one connection."""

    identity: bytes
    """ZMQ's name of the connection."""
    instance_id: str
    consumer_nonce: bytes
    producer_nonce: bytes
    last_seen: float
    layout: KVCacheLayout | None = None
    """None: HELLO_SENT."""
    memory: MemoryDescription | None = None
    """None: its blocks are only read."""
    agent_name: str = ""
    """Under which the agent knows its memory; empty without one."""
    slots: DlistHandle | None = None
    """The heads that both workers hold, in each slot of its memory: of just the memory it described, should the agent learn of a
    newer one under the same name."""
    error: str = ""
    """FAILED: why."""


class SessionRegistry:
    def __init__(
        self,
        context: ConnectorContext,
        *,
        send: Send,
        lost: Callable[[Session, str], None],
    ) -> None:
        """
        Args:
            lost: (session, why): nothing may be begun for this session any more.
        """
        self._context = context
        self._agent, self._layout, self._lease_s = (
            context.agent,
            context.memory.layout,
            context.config.lease_s,
        )
        self._token = auth.derive_token(context.service_key)
        self._send = send
        self._lost = lost
        self._pending: OrderedDict[bytes, Session] = OrderedDict()
        self._open: OrderedDict[bytes, Session] = OrderedDict()  # longest silent first, as above
        self._failed: list[Session] = []
        self._next_probe = 0.0

    def find(self, identity: bytes, now: float) -> Session | None:
        """The OPEN session of a connection that just gave a sign."""
        session = self._open.get(identity)
        if session is not None:
            session.last_seen = now
            self._open.move_to_end(identity)
        return session

    def refuse(self, identity: bytes, reason: str, *, succeeded: bool = False) -> None:
        """Of a handshake or of anything before it; the connection has to handle_hello anew.

        Args:
            succeeded: the consumer asked for an engine that had this address before.
        """
        self._context.stats.handshakes_refused += 1
        self.forget(identity, reason)
        self._send(identity, side_channel.Refused(reason, succeeded))

    def handle_hello(self, identity: bytes, hello: side_channel.Hello, now: float) -> None:
        self.forget(identity, "the consumer greeted anew")
        ours = (side_channel.VERSION, self._context.compatibility_hash, self._context.instance_id)
        theirs = (hello.version, hello.compatibility_hash, hello.peer_instance_id)
        names = (
            "side channel version",
            "compatibility hash (of checkpoint, dtype and quantization)",
            "instance id",
        )
        for name, mine, other in zip(names, ours, theirs, strict=True):
            if mine != other:
                why = f"{name} differs: {mine} at the producer, {other} at the consumer"
                self.refuse(identity, why, succeeded=name == "instance id")
                return
        if len(hello.nonce) != auth.NONCE_BYTES or not 0 < len(hello.instance_id) <= MAX_ID_LENGTH:
            self.refuse(
                identity,
                f"HELLO needs a nonce of {auth.NONCE_BYTES} bytes and an instance id of 1 to {MAX_ID_LENGTH} characters, "
                f"got {len(hello.nonce)} and {len(hello.instance_id)}",
            )
            return
        session = Session(identity, hello.instance_id, hello.nonce, auth.new_nonce(), now)
        self._pending[identity] = session
        if len(self._pending) > MAX_HANDSHAKES:
            self._pending.popitem(last=False)
        self._send(
            identity,
            side_channel.Welcome(
                *ours, nonce=session.producer_nonce, proof=self._proof(session, auth.PRODUCER)
            ),
        )

    def handle_describe(self, identity: bytes, message: side_channel.Describe, now: float) -> None:
        session = self._pending.pop(identity, None)
        if session is None:
            self.refuse(identity, "HELLO must come first, and DESCRIBE once")
        elif not auth.verify_proof(self._proof(session, auth.CONSUMER), message.proof):
            self.refuse(
                identity,
                "the consumer did not checksum_blocks the producer's token: service_key_file differs",
            )
        elif mismatch := explain_layout_mismatch(
            self._layout, message.layout
        ) or _explain_invalid_layout(message.layout):
            self.refuse(identity, mismatch)
        elif wrong := self._register_memory(session, message.layout, message.memory):
            self.refuse(identity, f"the consumer described its memory wrongly: {wrong}")
        else:
            session.layout, session.memory, session.last_seen = message.layout, message.memory, now
            self._open[identity] = session
            if len(self._open) > MAX_OPEN:
                self.forget(next(iter(self._open)), "too many consumers greeted after it")
            ours = self._context.describe_memory()
            self._send(
                identity,
                side_channel.Description(self._layout, ours, self._lease_s, self._context.ranks),
            )

    def forget(self, identity: bytes, reason: str) -> None:
        """The connection is gone or worth nothing: nothing more is sent or written to it."""
        self._pending.pop(identity, None)
        session = self._open.pop(identity, None)
        if session is None:
            return
        session.error = session.error or reason
        if session.slots is not None:
            self._agent.release_dlist_handle(session.slots)
        if session.agent_name and not self._users(session.agent_name):
            self._agent.remove_remote_agent(session.agent_name)  # writes in flight end in ERR
        self._lost(session, session.error)

    def fail(self, session: Session, reason: str) -> None:
        """Writing to its memory failed, or does not end: the agent lets go of it, and whoever shares that agent fails, too."""
        if session.agent_name:
            self._agent.remove_remote_agent(session.agent_name)
        self._fail(self._users(session.agent_name), reason)

    def fail_all(self, reason: str) -> None:
        """The agent knows no peer any more."""
        self._fail([session for session in self._open.values() if session.agent_name], reason)

    def refuse_failed(self, busy: Callable[[Session], bool]) -> None:
        """Lets failed sessions go, save those to which something is in flight."""
        for session in [session for session in self._failed if not busy(session)]:
            self._failed.remove(session)
            if self._open.get(session.identity) is session:
                self.forget(session.identity, session.error)
                self._send(session.identity, side_channel.Refused(session.error))

    def probe(self, now: float) -> None:
        """Sends silent consumers an empty PENDING: to a connection that is gone it cannot be sent, which ends the session."""
        if now < self._next_probe:
            return
        self._next_probe = now + self._lease_s
        for session in [
            session
            for session in self._pending.values()
            if now - session.last_seen >= self._lease_s
        ]:
            del self._pending[session.identity]
        for session in list(self._open.values()):
            if now - session.last_seen < self._lease_s:
                break
            self._send(session.identity, side_channel.Pending([]))

    def _proof(self, session: Session, role: str) -> bytes:
        return auth.compute_proof(
            self._token,
            role,
            consumer_nonce=session.consumer_nonce,
            producer_nonce=session.producer_nonce,
            consumer_id=session.instance_id,
            producer_id=self._context.instance_id,
        )

    def _fail(self, sessions: list[Session], reason: str) -> None:
        for session in sessions:
            if not session.error:
                session.error = reason
                self._failed.append(session)
                self._lost(session, reason)

    def _users(self, agent_name: str) -> list[Session]:
        return [
            session
            for session in self._open.values()
            if agent_name and session.agent_name == agent_name
        ]

    def _register_memory(
        self, session: Session, layout: KVCacheLayout, memory: MemoryDescription | None
    ) -> str:
        """Makes the consumer's memory known to the agent; returns what is wrong with it, if anything."""
        if memory is None:
            return ""
        nbytes = memory.num_slots * memory.slot_nbytes
        if memory.slot_nbytes != layout.block_nbytes:
            return f"slots of {memory.slot_nbytes} bytes for blocks of {layout.block_nbytes}"
        if not 0 < memory.num_slots <= MAX_SLOTS:
            return f"{memory.num_slots} slots, at most {MAX_SLOTS} can be"
        if memory.base_address < 0 or memory.base_address + nbytes >= _MAX_ADDRESS:
            return f"{nbytes} bytes from address {memory.base_address:#x} on"
        if not 0 <= memory.device_id < 2**31:
            return f"device {memory.device_id}"
        name = ""
        try:
            name = self._agent.add_remote_agent(memory.agent_metadata)
            heads = self._layout.heads.overlap(layout.heads)
            if heads.count:
                rows = slot_rows(
                    memory.base_address, memory.num_slots, layout, heads, device_id=memory.device_id
                )
                session.slots = self._agent.prep_xfer_dlist(name, rows, memory.mem_type)
            wrong = (
                ""
                if name.rpartition("/")[0] == session.instance_id
                else f"its agent is called {name}"
            )
        except (
            ValueError,
            LookupError,
            ArithmeticError,
            MemoryError,
            RuntimeError,
            msgspec.MsgspecError,
        ) as error:
            wrong = str(error)
        others = self._users(name)
        if wrong:
            if name and not others:
                self._agent.remove_remote_agent(name)
            return wrong
        for other in others:
            # The agent knows the new memory under this name now; what was agreed about the older one must not reach it.
            if other.memory is not None and other.memory.agent_metadata != memory.agent_metadata:
                other.agent_name = ""
                self.forget(other.identity, "the consumer registered its memory anew")
        session.agent_name = name
        return ""


def _explain_invalid_layout(layout: KVCacheLayout) -> str:
    """What cannot be in a layout that `explain_layout_mismatch` passed."""
    heads = layout.heads
    if (
        layout.num_blocks < 1
        or heads.first < 0
        or heads.count < 1
        or heads.end > layout.num_model_heads
    ):
        return (
            f"the consumer's layout has {layout.num_blocks} blocks and KV heads [{heads.first}, {heads.end}) "
            f"of {layout.num_model_heads}"
        )
    return ""
