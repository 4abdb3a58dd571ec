"""Find free TCP ports, resolve ports of containers, and parse ports from command lines."""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
_FIRST = 20_000
_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Find `count` different free ports of `host`.

    The ports are below the system's ephemeral range where possible. The system could assign an
    ephemeral port to another process before the caller uses the port.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates = (
        [*random.SystemRandom().sample(range(_FIRST, end), 50 * count)]
        if (end := _first_handed_out())
        else []
    )
    candidates += [0] * count  # 0: the system assigns an ephemeral port
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in candidates:
            probe = held.enter_context(socket.socket(family))
            try:
                probe.bind((host, port))
            except OSError:
                if port == 0:
                    raise
                continue
            found.append(probe.getsockname()[1])
            if len(found) == count:
                break
    return found


def container_port(port: int | str, containers: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the port number for `port`, a number or the name of a port of `containers`.

    The result is None if no container has a port with that name.
    """
    if isinstance(port, int) or port.isdigit():
        return int(port)
    ports = (entry for container in containers for entry in container.get("ports") or [])
    return next((int(entry["containerPort"]) for entry in ports if entry.get("name") == port), None)


def parse_port(text: str) -> int:
    """Parse a port number on the command line. 0 means any free port."""
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be in [0, {MAX_PORT}], got {text}")
    return int(text)


def _first_handed_out() -> int:
    """Return the lowest port of the ephemeral range, from which the system assigns ports.

    The result is 0 if the range is unknown, or begins less than 5000 ports above `_FIRST`.
    """
    try:
        first = int(_HANDED_OUT.read_text().split()[0])
    except (OSError, ValueError):
        return 0
    return first if first >= _FIRST + 5_000 else 0
