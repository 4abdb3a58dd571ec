"""The producers' workers to which this worker is connected."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from baton_kv_transfer.connector_context import ConnectorContext
from baton_kv_transfer.consumer.peer import Peer
from baton_kv_transfer.side_channel import MemoryDescription


class PeerRegistry:
    """The connected peers, by address and instance id."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._known: dict[tuple[str, int, str], Peer] = {}
        #: Push: description of this worker's memory for handshakes. None with pull, and before
        #: `describe_memory`.
        self._push_memory: MemoryDescription | None = None

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._known.values()))

    def describe_memory(self) -> None:
        """With push, create the description of this worker's memory for later handshakes.

        Call this again after a fence (`Agent.fence`), because the agent has new metadata then.
        """
        self._push_memory = (
            self._context.describe_memory() if self._context.config.mode == "push" else None
        )

    def connect(self, host: str, port: int, peer_instance_id: str, now: float) -> Peer:
        """Return the peer with this address and instance id. Connect if there is no connection.

        Raises:
            zmq.ZMQError: host and port do not form an address, or the limit of open sockets is
                reached.
        """
        key = (host, port, peer_instance_id)
        if key not in self._known:
            self._known[key] = Peer(
                self._context,
                self._push_memory,
                host=host,
                port=port,
                peer_instance_id=peer_instance_id,
                now=now,
            )
        return self._known[key]

    def connect_workers(self, lead_peer: Peer, now: float) -> tuple[dict[int, Peer], str]:
        """Connect to the producer's workers that share heads with this worker.

        Args:
            lead_peer: worker 0 of the producer, which names all workers. Until this peer is
                ready, the result has no workers.
            now: the current time.

        Returns:
            The workers by rank, and why a connection could not be started; empty if all could.
        """
        workers, error = {}, ""
        for rank, address in enumerate(lead_peer.ranks if lead_peer.is_ready else ()):
            if not self._context.memory.layout.heads.overlap(address.heads).count:
                continue
            host, port = address.host, address.port
            try:
                workers[rank] = (
                    self.connect(host, port, lead_peer.peer_instance_id, now) if rank else lead_peer
                )
            except zmq.ZMQError as failure:
                error = (
                    f"cannot connect to worker {rank} of {lead_peer.name} at {host}:{port}: "
                    f"{failure}"
                )
        return workers, error

    def remove(self, peer: Peer) -> None:
        """Disconnect and forget a peer. A later `connect` makes a new connection."""
        self._known = {key: known for key, known in self._known.items() if known is not peer}
        peer.close()
