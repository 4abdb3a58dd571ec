"""The producers' workers this engine knows."""

from __future__ import annotations

from collections.abc import Iterator

from baton_kv_transfer.consumer.peer import Peer
from baton_kv_transfer.context import ConnectorContext


class PeerRegistry:
    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._known: dict[tuple[str, int, str], Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._known.values()))

    def describe_memory(self) -> None:
        """Describes this worker's memory for handshakes from now on; again after a fence: the agent's metadata is new."""
        self._offered = (
            self._context.describe_memory() if self._context.config.mode == "push" else None
        )

    def connect(self, host: str, port: int, peer_instance_id: str, now: float) -> Peer:
        """The peer at this address, greeted now if it is not known.

        Raises:
            zmq.ZMQError: host and port are no address, or no more sockets can be opened.
        """
        key = (host, port, peer_instance_id)
        if key not in self._known:
            self._known[key] = Peer(
                self._context,
                self._offered,
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
