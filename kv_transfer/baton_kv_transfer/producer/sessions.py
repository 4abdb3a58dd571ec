"""The handshakes with consumers, and the consumers' memory in the agent.

The connector's thread calls all methods. A session has these states:

    pending   HELLO was accepted and WELCOME sent. Memory was not described.
    OPEN      The proof and the layout were right; DESCRIPTION was sent. Transfers may be requested.
    FAILED    A write to the consumer failed, or a fence (`Agent.fence`) removed the consumer's
              agent. REFUSED is sent when all writes of the session have ended.

`Session.layout` is None while the handshake is pending. `Session.error` is set once a session has
FAILED.

A session is removed when its connection is lost, when the consumer sends HELLO again, or when too
many consumers have connected. The consumer's agent is removed with the last session that uses it,
or when a write to the consumer fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from baton_kv_transfer import auth, side_channel
from baton_kv_transfer.agent.agent import DlistHandle
from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.memory.layout import KVCacheLayout, explain_layout_mismatch
from baton_kv_transfer.side_channel import MemoryDescription

#: Limit of pending handshakes. Above this limit, the oldest handshake is dropped.
MAX_HANDSHAKES = 1024
#: Limit of open sessions. Above this limit, the consumer that has been silent longest is removed
#: and has to connect again.
MAX_OPEN = 4096
MAX_ID_LENGTH = 512

#: A function (ZeroMQ identity of a connection, message) that sends the message.
Send = Callable[[bytes, side_channel.ToConsumer], None]


@dataclass(slots=True, eq=False)
class Session:
    """One connection of a consumer's worker."""

    #: ZeroMQ's name of the connection.
    identity: bytes
    instance_id: str
    consumer_nonce: bytes
    producer_nonce: bytes
    last_seen: float
    #: Layout of the KV memory of the consumer's worker. None: the handshake is pending.
    layout: KVCacheLayout | None = None
    #: Memory to which this producer writes; None: the consumer reads.
    memory: MemoryDescription | None = None
    #: Name of the consumer's agent; empty without memory.
    agent_name: str = ""
    #: Prepared descriptors of the shared heads in each slot of `memory`. None without `memory` or
    #: shared heads.
    slot_descs: DlistHandle | None = None
    #: Why the session FAILED or was removed; empty before.
    error: str = ""


class SessionRegistry:
    """The sessions with all consumers, by connection."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._agent = context.agent
        self._layout = context.memory.layout
        self._lease_s = context.config.lease_s
        self._token = auth.derive_token(context.service_key)
        self._pending: OrderedDict[bytes, Session] = OrderedDict()
        self._open: OrderedDict[bytes, Session] = OrderedDict()  # longest silent first
        #: FAILED sessions that were not removed yet.
        self.failed: list[Session] = []
        self._next_probe = 0.0

    def find(self, identity: bytes, now: float) -> Session | None:
        """Return the OPEN session of a connection, and record that a message has arrived.

        The result is None if the connection has no OPEN session.
        """
        session = self._open.get(identity)
        if session is not None:
            session.last_seen = now
            self._open.move_to_end(identity)
        return session

    def handle_hello(
        self, identity: bytes, hello: side_channel.Hello, now: float
    ) -> side_channel.Welcome | side_channel.Refused:
        """Handle HELLO: begin a connection's handshake, and return WELCOME or REFUSED."""
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
                # With another instance id, the consumer expects an earlier engine at this address.
                return side_channel.Refused(why, succeeded=name == "instance id")
        if len(hello.nonce) != auth.NONCE_BYTES or not 0 < len(hello.instance_id) <= MAX_ID_LENGTH:
            return side_channel.Refused(
                f"HELLO needs a nonce of {auth.NONCE_BYTES} bytes and an instance id of 1 to "
                f"{MAX_ID_LENGTH} characters, got {len(hello.nonce)} and {len(hello.instance_id)}"
            )
        session = Session(identity, hello.instance_id, hello.nonce, auth.new_nonce(), now)
        self._pending[identity] = session
        if len(self._pending) > MAX_HANDSHAKES:
            self._pending.popitem(last=False)
        return side_channel.Welcome(
            *ours, nonce=session.producer_nonce, proof=self._proof(session, auth.PRODUCER)
        )

    def handle_describe(
        self, identity: bytes, message: side_channel.Describe, now: float
    ) -> tuple[side_channel.Description | side_channel.Refused, list[Session]]:
        """Handle DESCRIBE: complete the handshake of a connection.

        Returns:
            The answer, and the sessions of other connections that this call has removed.
        """
        session = self._pending.pop(identity, None)
        if session is None:
            return side_channel.Refused("HELLO must come first, and DESCRIBE once"), []
        if not auth.verify_proof(self._proof(session, auth.CONSUMER), message.proof):
            why = "the consumer's token is not the producer's: service_key_file differs"
            return side_channel.Refused(why), []
        if mismatch := explain_layout_mismatch(
            self._layout, message.layout
        ) or _explain_invalid_layout(message.layout):
            return side_channel.Refused(mismatch), []
        if wrong := self._register_memory(session, message.layout, message.memory):
            why = f"the consumer sent an invalid description of its memory: {wrong}"
            return side_channel.Refused(why), []
        lost = self._forget_older_memory(session.agent_name, message.memory)
        session.layout, session.memory, session.last_seen = message.layout, message.memory, now
        self._open[identity] = session
        if len(self._open) > MAX_OPEN:
            lost += self.forget(next(iter(self._open)), "too many consumers connected after it")
        ours = self._context.describe_memory()
        ranks = self._context.ranks
        return side_channel.Description(self._layout, ours, self._lease_s, ranks), lost

    def forget(self, identity: bytes, reason: str) -> list[Session]:
        """Remove the session of a connection.

        Returns:
            A list with the session if it was OPEN or FAILED. An empty list if the handshake was
            pending, or if there was no session.
        """
        self._pending.pop(identity, None)
        session = self._open.pop(identity, None)
        if session is None:
            return []
        if session.error:
            self.failed.remove(session)
        session.error = session.error or reason
        if session.slot_descs is not None:
            self._agent.release_dlist_handle(session.slot_descs)
        if session.agent_name and not self._find_by_agent(session.agent_name):
            self._agent.remove_remote_agent(session.agent_name)  # ends writes in flight in ERR
        return [session]

    def fail(self, session: Session, reason: str) -> list[Session]:
        """Fail a session after a failed write, and remove the consumer's agent.

        Sessions that share this agent fail as well. Return all sessions that this call has failed.
        """
        if session.agent_name:
            self._agent.remove_remote_agent(session.agent_name)
        return self._fail(self._find_by_agent(session.agent_name), reason)

    def fail_all(self, reason: str) -> list[Session]:
        """Fail all sessions that use push, after a fence (`Agent.fence`) has removed the agents.

        Return the sessions that this call has failed.
        """
        return self._fail([one for one in self._open.values() if one.agent_name], reason)

    def take_silent(self, now: float) -> list[bytes]:
        """Return the identities of silent connections, which the caller must probe.

        A connection is silent if no message has arrived for the duration of a lease. The check runs
        at most once in this duration, and other calls return an empty list. The check also drops
        handshakes that have timed out.
        """
        if now < self._next_probe:
            return []
        self._next_probe = now + self._lease_s
        for session in [
            session
            for session in self._pending.values()
            if now - session.last_seen >= 2 * side_channel.HANDSHAKE_TIMEOUT_S
        ]:
            del self._pending[session.identity]
        sessions = self._open.values()
        return [one.identity for one in sessions if now - one.last_seen >= self._lease_s]

    def _proof(self, session: Session, role: str) -> bytes:
        return auth.compute_proof(
            self._token,
            role,
            consumer_nonce=session.consumer_nonce,
            producer_nonce=session.producer_nonce,
            consumer_id=session.instance_id,
            producer_id=self._context.instance_id,
        )

    def _fail(self, sessions: list[Session], reason: str) -> list[Session]:
        failed = [session for session in sessions if not session.error]
        for session in failed:
            session.error = reason
        self.failed += failed
        return failed

    def _find_by_agent(self, agent_name: str) -> list[Session]:
        return [
            session
            for session in self._open.values()
            if agent_name and session.agent_name == agent_name
        ]

    def _register_memory(
        self, session: Session, layout: KVCacheLayout, memory: MemoryDescription | None
    ) -> str:
        """Add the consumer's agent, and prepare descriptors of the consumer's memory.

        Do nothing if `memory` is None, because such a consumer reads the blocks itself.

        Returns:
            Why the description of the memory is invalid; empty if it is valid.
        """
        if memory is None:
            return ""
        if wrong := side_channel.explain_invalid_memory(memory, layout):
            return wrong
        name = ""
        try:
            name = self._agent.add_remote_agent(memory.agent_metadata)
            session.slot_descs = self._context.peer_slot_descs(name, memory, layout)
            wrong = (
                ""
                if name.rpartition("/")[0] == session.instance_id
                else f"its agent is called {name}"
            )
        except side_channel.INVALID_DESCRIPTION as error:
            wrong = str(error)
        if not wrong:
            session.agent_name = name
        elif name and not self._find_by_agent(name):
            self._agent.remove_remote_agent(name)
        return wrong

    def _forget_older_memory(
        self, agent_name: str, memory: MemoryDescription | None
    ) -> list[Session]:
        """Remove and return the agent's sessions that were opened with memory other than `memory`.

        The agent's name now refers to `memory`, so writes of these sessions would reach the wrong
        memory. If `memory` is None, no session is removed.
        """
        lost = []
        for other in self._find_by_agent(agent_name):
            if memory and other.memory and other.memory.agent_metadata != memory.agent_metadata:
                other.agent_name = ""
                lost += self.forget(other.identity, "the consumer registered new memory")
        return lost


def _explain_invalid_layout(layout: KVCacheLayout) -> str:
    """Return why the numbers of blocks or heads in a layout are invalid; empty if valid."""
    heads = layout.heads
    if (
        layout.num_blocks < 1
        or heads.first < 0
        or heads.count < 1
        or heads.end > layout.num_model_heads
    ):
        return (
            f"the consumer's layout has {layout.num_blocks} blocks and KV heads "
            f"[{heads.first}, {heads.end}) of {layout.num_model_heads}"
        )
    return ""
