"""The base class of the transports over sockets, `tcp` and `shm`."""

from __future__ import annotations

import contextlib
from typing import Any, Generic, TypeVar

from baton_kv_transfer.transports.sockets.peer_link import NOTIF, PeerLink
from baton_kv_transfer.transports.sockets.peer_server import PeerServer
from baton_kv_transfer.transports.transfer import Region, TransportError
from baton_kv_transfer.transports.transport import Transport, TransportContext

_Link = TypeVar("_Link", bound=PeerLink)


class SocketTransport(Transport, Generic[_Link]):
    """A transport with a link to each added peer and a server for peers that connect."""

    _server: PeerServer[Any]

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._links: dict[str, _Link] = {}

    @property
    def address(self) -> bytes:  # type: ignore[override]
        return self._server.address

    def forget_region(self, region: Region) -> None:
        self._server.forget_region(region)

    def remove_peer(self, name: str) -> None:
        link = self._links.get(name)
        if link is not None:
            link.withdraw()
            # A closed transport closes all links itself.
            with contextlib.suppress(TransportError):
                self._thread.commands.submit(lambda: link.abort(f"agent {name} was removed"))
                del self._links[name]

    def send_notif(self, name: str, message: bytes) -> bool:
        link = self._links.get(name)
        if link is not None:
            link.post(NOTIF, message)
        return link is not None

    def remove_all_peers(self, reason: str) -> None:
        """Remove all peers, and end their transfers in ERR with the error `reason`."""
        for name in list(self._links):
            link = self._links.pop(name, None)
            if link is not None:
                link.withdraw()
                link.abort(reason)
