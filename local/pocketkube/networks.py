"""Addresses of one cluster among several on this machine: every cluster gets ranges that no other one uses while it lives."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

# (pods, services): within 127/8, which is there anyway, or for an API server that refuses 127/8 in Endpoints.
_RANGES = {
    "embedded": ("127.77.0.0/16", "127.96.0.0/16"),
    "real": ("198.18.0.0/16", "198.19.0.0/16"),
}
_PREFIX = 20
CLUSTERS = 2 ** (_PREFIX - 16)


class NetworksInUseError(Exception):
    """As many clusters as there are ranges run on this machine."""


@dataclass(frozen=True)
class Networks:
    """Ranges of 4096 addresses in CIDR notation, held by `claim` until `release` or the end of this process."""

    pods: str
    services: str
    claim: socket.socket

    def release(self) -> None:
        self.claim.close()


def claim_networks(control_plane: str) -> Networks:
    """The first ranges nobody holds. Raises: NetworksInUseError.

    A name in the abstract socket namespace is the claim: it lives in the network namespace, as the loopback device does, it
    counts for all users, and the kernel takes it back when the process ends, however it ends.
    """
    pods, services = (
        list(ipaddress.ip_network(text).subnets(new_prefix=_PREFIX))
        for text in _RANGES[control_plane]
    )
    for index in range(CLUSTERS):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0pocketkube-networks-{index}")
        except OSError:
            claim.close()
            continue
        return Networks(str(pods[index]), str(services[index]), claim)
    raise NetworksInUseError(f"{CLUSTERS} local clusters run on this machine; end one of them")
