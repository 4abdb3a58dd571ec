"""Addresses on the loopback device: 127/8 is there anyway, any other is added as /32 and taken away again."""

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
    """Where a Service's port is served: on itself, or 8000 above where the system keeps it for root (80 on 8080)."""
    if port >= 1024 or os.geteuid() == 0:
        return port
    try:
        reserved = int(_UNPRIVILEGED_PORTS.read_text())
    except OSError:
        reserved = 1024
    return port if port >= reserved else port + 8000


class LoopbackAddresses:
    """The addresses this process added. They are noted in a file, so that a successor removes what a killed one left."""

    def __init__(self, ledger: Path):
        self._ledger = ledger
        self._added: set[str] = set()

    def remove_stale(self) -> None:
        """Remove what the ledger of a dead predecessor names."""
        try:
            stale = json.loads(self._ledger.read_text())
        except (FileNotFoundError, ValueError):
            return
        for address in stale:
            _ip("del", address)
        self._ledger.unlink()

    def add(self, address: str) -> None:
        """Make `address` bindable. Raises: OSError if the device refuses it (needs CAP_NET_ADMIN)."""
        if ipaddress.ip_address(address) in _ALWAYS_THERE or address in self._added:
            return
        # Noted first: a ledger entry without an address does no harm, the opposite would leak.
        self._added.add(address)
        self._save()
        error = _ip("add", address)
        there = (
            "File exists" in error or "already assigned" in error
        )  # of a killed process with another ledger: now ours
        if error and not there:
            self._added.discard(address)
            self._save()
            raise OSError(
                f"ip addr add {address}/32 dev lo: {error}; run as root (CAP_NET_ADMIN) or use addresses in 127.0.0.0/8"
            )

    def remove(self, address: str) -> None:
        """Take back an address added here; others are left alone."""
        if address in self._added:
            _ip("del", address)
            self._added.discard(address)
            self._save()

    def keep_only(self, addresses: Collection[str]) -> None:
        """Take back every address added here that is not in `addresses`."""
        for address in self._added - set(addresses):
            self.remove(address)

    def remove_all(self) -> None:
        """Take back every address added here."""
        for address in list(self._added):
            self.remove(address)

    def _save(self) -> None:
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._ledger.with_suffix(".new")
        temporary.write_text(json.dumps(sorted(self._added)))
        os.replace(temporary, self._ledger)


def _ip(verb: str, address: str) -> str:
    """Run `ip addr add|del`; the error text, empty on success."""
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
