"""The producers' workers this engine knows, and how it introduces itself to new ones."""

from __future__ import annotations

from collections.abc import Iterator

from baton_engine.protocol.service_key import ServiceKey
from baton_kv_transfer.agent import Agent
from baton_kv_transfer.connector import ConnectorStats
from baton_kv_transfer.memory import KVMemory
from baton_kv_transfer.peer import Introduction, Peer
from baton_kv_transfer.side_channel import MemoryDescription


class Peers:
    def __init__(
        self,
        agent: Agent,
        *,
        instance_id: str,
        compatibility_hash: str,
        service_key: ServiceKey | None,
        push: bool,
        stats: ConnectorStats,
    ) -> None:
        self._agent = agent
        self._instance_id = instance_id
        self._compatibility_hash = compatibility_hash
        self._service_key = service_key
        self._push = push
        self._stats = stats
        self._known: dict[tuple[str, int, str], Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._known.values()))

    def introduce(self, memory: KVMemory) -> None:
        """What is said in handshakes from now on; again after a fence: the agent's metadata is new."""
        offered = MemoryDescription(
            self._agent.get_agent_metadata(),
            memory.base_address,
            memory.num_slots,
            memory.layout.block_nbytes,
            memory.mem_type,
            memory.device_id,
        )
        self._introduction = Introduction(
            self._instance_id,
            self._compatibility_hash,
            self._service_key,
            memory.layout,
            offered if self._push else None,
        )

    def greet(self, host: str, port: int, peer_instance_id: str, now: float) -> Peer:
        """The peer at this address, greeted now if it is not known.

        Raises:
            zmq.ZMQError: host and port are no address, or no more sockets can be opened.
        """
        key = (host, port, peer_instance_id)
        if key not in self._known:
            self._known[key] = Peer(
                self._agent,
                self._introduction,
                self._stats,
                host=host,
                port=port,
                peer_instance_id=peer_instance_id,
                now=now,
            )
        return self._known[key]

    def remove(self, peer: Peer) -> None:
        """Disconnects it; the next load greets anew."""
        self._known = {key: known for key, known in self._known.items() if known is not peer}
        peer.close()
