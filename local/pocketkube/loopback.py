"""Add addresses outside 127.0.0.0/8 to the loopback device, and remove them after use."""

from __future__ import annotations

import ipaddress
import json
import logging
import subprocess
from collections.abc import Collection
from pathlib import Path

from pocketkube.private_files import write_private

logger = logging.getLogger(__name__)

_UNPRIVILEGED_PORTS = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
_STATUS = Path("/proc/self/status")
_NET_BIND_SERVICE = 10  # number of the capability in capabilities(7)
_ALWAYS_THERE = ipaddress.ip_network("127.0.0.0/8")


def served_port(port: int) -> int:
    """Return the port on which the proxy listens for the Service port `port`.

    A port that this process may not bind is replaced by `port + 8000`: 80 becomes 8080.
    """
    if port >= 1024 or _has_capability(_NET_BIND_SERVICE):
        return port
    try:
        reserved = int(_UNPRIVILEGED_PORTS.read_text())
    except OSError:
        reserved = 1024
    return port if port >= reserved else port + 8000


class LoopbackAddresses:
    """The addresses that this process has added to the loopback device.

    Args:
        ledger: file that records the addresses. If this process is killed, the next process removes
            the addresses with `remove_stale()`.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._added: set[str] = set()

    def remove_stale(self) -> None:
        """Remove the addresses that a previous process added and recorded in `ledger`."""
        try:
            stale = json.loads(self._ledger.read_text())
        except (FileNotFoundError, ValueError):
            return
        for address in stale:
            _ip("del", address)
        self._ledger.unlink()

    def add(self, address: str) -> None:
        """Add `address` to the loopback device, unless it is in 127.0.0.0/8 or was added before.

        Raises:
            OSError: the address cannot be added. The usual reason is a missing CAP_NET_ADMIN.
        """
        if ipaddress.ip_address(address) in _ALWAYS_THERE or address in self._added:
            return
        # The record comes first. A record without an address is harmless, but an address without
        # a record would never be removed.
        self._added.add(address)
        self._save()
        error = _ip("add", address)
        # If the address exists already, a killed process recorded it in another file. This process
        # then takes the address over.
        there = "File exists" in error or "already assigned" in error
        if error and not there:
            self._added.discard(address)
            self._save()
            raise OSError(
                f"ip addr add {address}/32 dev lo: {error}; run as root (CAP_NET_ADMIN) or use "
                "addresses in 127.0.0.0/8"
            )

    def remove(self, address: str) -> None:
        """Remove `address` if `add()` added it, else do nothing."""
        if address in self._added:
            _ip("del", address)
            self._added.discard(address)
            self._save()

    def keep_only(self, addresses: Collection[str]) -> None:
        """Remove all added addresses that are not in `addresses`."""
        for address in self._added - set(addresses):
            self.remove(address)

    def remove_all(self) -> None:
        """Remove all added addresses."""
        for address in list(self._added):
            self.remove(address)

    def _save(self) -> None:
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        write_private(self._ledger, json.dumps(sorted(self._added)).encode())


def _has_capability(number: int) -> bool:
    line = next(each for each in _STATUS.read_text().splitlines() if each.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> number & 1)


def _ip(verb: str, address: str) -> str:
    """Run `ip addr add` or `ip addr del`. Return the error text, empty on success."""
    try:
        done = subprocess.run(
            ["ip", "addr", verb, f"{address}/32", "dev", "lo"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""
