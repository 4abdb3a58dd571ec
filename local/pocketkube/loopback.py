"""Addresses on the loopback device: those outside 127/8 are added as /32 and removed again."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import subprocess
from collections.abc import Collection
from pathlib import Path

logger = logging.getLogger(__name__)

_UNPRIVILEGED_PORTS = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
_ALWAYS_THERE = ipaddress.ip_network("127.0.0.0/8")


def served_port(port: int) -> int:
    """Return the port where a Service's port is served.

    A port below 1024 that the system keeps for root is served 8000 higher, 80 on 8080.
    """
    if port >= 1024 or os.geteuid() == 0:
        return port
    try:
        reserved = int(_UNPRIVILEGED_PORTS.read_text())
    except OSError:
        reserved = 1024
    return port if port >= reserved else port + 8000


class LoopbackAddresses:
    """The addresses that this process has added.

    A file records them, so that the next process can remove what a killed one left.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._added: set[str] = set()

    def remove_stale(self) -> None:
        """Remove the addresses in the file of a previous process."""
        try:
            stale = json.loads(self._ledger.read_text())
        except (FileNotFoundError, ValueError):
            return
        for address in stale:
            _ip("del", address)
        self._ledger.unlink()

    def add(self, address: str) -> None:
        """Make `address` bindable.

        Raises:
            OSError: the device refuses it, which needs CAP_NET_ADMIN.
        """
        if ipaddress.ip_address(address) in _ALWAYS_THERE or address in self._added:
            return
        # Recorded first: a record without an address is harmless, an address without a record
        # stays.
        self._added.add(address)
        self._save()
        error = _ip("add", address)
        # Left by a killed process with another file; it belongs to this one now.
        there = "File exists" in error or "already assigned" in error
        if error and not there:
            self._added.discard(address)
            self._save()
            raise OSError(
                f"ip addr add {address}/32 dev lo: {error}; run as root (CAP_NET_ADMIN) or use "
                "addresses in 127.0.0.0/8"
            )

    def remove(self, address: str) -> None:
        """Remove an address that was added here. Others are left alone."""
        if address in self._added:
            _ip("del", address)
            self._added.discard(address)
            self._save()

    def keep_only(self, addresses: Collection[str]) -> None:
        """Remove the addresses that were added here and are not in `addresses`."""
        for address in self._added - set(addresses):
            self.remove(address)

    def remove_all(self) -> None:
        """Remove all addresses that were added here."""
        for address in list(self._added):
            self.remove(address)

    def _save(self) -> None:
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._ledger.with_suffix(".new")
        temporary.write_text(json.dumps(sorted(self._added)))
        os.replace(temporary, self._ledger)


def _ip(verb: str, address: str) -> str:
    """Run `ip addr add` or `del`, and return the error text, which is empty on success."""
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
