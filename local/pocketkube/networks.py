"""Claim address ranges for a cluster, so that several clusters can run on one machine."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

#: Control plane -> range of the addresses of pods. Each cluster claims a part of the range. The
#: range of "real" is outside 127/8, because kube-apiserver refuses addresses of 127/8 in Endpoints.
POD_RANGES = {"embedded": "127.77.0.0/16", "real": "198.18.0.0/16"}
#: Control plane -> range of the addresses of Services, of which each cluster claims a part.
SERVICE_RANGES = {"embedded": "127.96.0.0/16", "real": "198.19.0.0/16"}
_PREFIX = 20
CLUSTERS = 2 ** (_PREFIX - 16)


class NetworksInUseError(Exception):
    """No address range is free: too many clusters run on this machine."""


@dataclass(frozen=True)
class Networks:
    """The two address ranges of one cluster, in CIDR notation. Each has 4096 addresses.

    Attributes:
        claim: a socket that reserves the ranges until `release()` or the end of the process.
    """

    pods: str
    services: str
    claim: socket.socket

    def release(self) -> None:
        self.claim.close()


def claim_networks(control_plane: str) -> Networks:
    """Claim two free address ranges: one for pods and one for Services.

    A claim is a Unix socket bound to an abstract name. All users of the same network namespace, and
    thus of the same loopback device, share these names. The kernel releases a claim when the
    process ends.

    Raises:
        NetworksInUseError: all ranges are in use.
    """
    pods, services = (
        list(ipaddress.ip_network(text).subnets(new_prefix=_PREFIX))
        for text in (POD_RANGES[control_plane], SERVICE_RANGES[control_plane])
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
