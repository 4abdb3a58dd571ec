"""Allocate pod addresses from a pool, the least recently used address first.

The address of a deleted pod is therefore not reused immediately.
"""

from __future__ import annotations

import ipaddress
from collections import deque

from pocketkube.loopback import LoopbackAddresses


class AddressPool:
    """A pool of pod addresses in a network. The network's first host address is the node's."""

    def __init__(self, network: str, loopback: LoopbackAddresses):
        """Create the pool, and add the node's address to the loopback device.

        Raises:
            ValueError: `network` is not an IPv4 CIDR with at least 8 addresses.
            OSError: the node's address cannot be added.
        """
        self.network = ipaddress.IPv4Network(network)
        if self.network.num_addresses < 8:
            raise ValueError(
                f"address pool {network} has fewer than 8 addresses; "
                "use a wider one such as 127.77.0.0/16"
            )
        self._loopback = loopback
        self.node_address = str(self.network[1])
        self._next = 2
        self._used: set[str] = set()
        self._returned: deque[str] = deque()
        loopback.add(self.node_address)

    def allocate(self) -> str:
        """Allocate a free address, and add it to the loopback device.

        Raises:
            OSError: the pool is exhausted, or the address cannot be added.
        """
        if self._next < self.network.num_addresses - 1:
            address = str(self.network[self._next])
            self._next += 1
        elif self._returned:
            address = self._returned.popleft()
        else:
            raise OSError(f"no free address in {self.network}; use a wider --address-pool")
        try:
            self._loopback.add(address)
        except OSError:
            self._returned.append(address)
            raise
        self._used.add(address)
        return address

    def release(self, address: str) -> None:
        """Return `address` to the pool. No effect if `address` is empty or not allocated.

        All processes that used the address must have ended.
        """
        if address in self._used:
            self._used.discard(address)
            self._loopback.remove(address)
            self._returned.append(address)
