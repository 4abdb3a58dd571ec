"""Shared-memory transports of this process, and of another one on this host.

For the tests of the shared-memory transport and of its server.
"""

from __future__ import annotations

import msgspec

from baton_kv_transfer.transports.shm.shm_server import HostAddress
from baton_kv_transfer.transports.shm.shm_transport import SHMTransport
from support.kv_transfer.transport_rig import TransportHere

WORDS = 4096


class SHMTransportHere(TransportHere):
    transport_class = SHMTransport
    address_class = HostAddress
    num_words = WORDS

    def __init__(self, name: str) -> None:
        super().__init__(name, host="")

    def knows(self, address: HostAddress) -> bool:
        """Add a peer "x" at this address. Return whether it can be notified."""
        self.transport.add_peer("x", msgspec.msgpack.encode(address))
        return self.transport.send_notif("x", b"hello")
