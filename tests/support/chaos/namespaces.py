"""Network namespaces on one bridge. Tests can cut the links. Root and iproute2 are required.

For the chaos tests of networks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from support.pods import Network
from support.waiting import eventually


class Namespaces:
    """Network namespaces that reach each other and the test. The test's address is `host`."""

    def __init__(self, num: int, environment: dict[str, str]) -> None:
        number = os.getpid() % 200
        self.host = f"10.213.{number}.254"
        self._bridge = f"bt{number}br"
        self._names = [f"bt{number}ns{index}" for index in range(num)]
        self._links = [f"bt{number}v{index}" for index in range(num)]
        addresses = [f"10.213.{number}.{index + 1}" for index in range(num)]
        self.networks = [
            Network(address, ("ip", "netns", "exec", name), environment)
            for name, address in zip(self._names, addresses, strict=True)
        ]
        self._addresses = addresses

    def make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.host}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name, link, address in zip(self._names, self._links, self._addresses, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def cut(self, index: int) -> None:
        """Drop all packets to and from this namespace, without an error or a closed connection."""
        _ip("link", "set", self._links[index], "nomaster")

    def unplug(self, index: int) -> None:
        """Take the link of this namespace down, so that its interface has no carrier."""
        _ip("link", "set", self._links[index], "down")

    def part(self) -> None:
        """Isolate the namespaces from each other, but not from the test."""
        for link in self._links:
            _ip("link", "set", "dev", link, "type", "bridge_slave", "isolated", "on")

    def heal(self) -> None:
        for link in self._links:
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("link", "set", "dev", link, "type", "bridge_slave", "isolated", "off")

    def wait_until_resent(self) -> None:
        """Wait until TCP has resent what was lost in an outage.

        The kernel doubles its delay with each loss. So after an outage, a connection may be silent
        for about as long again.
        """

        def resent() -> bool:
            sockets = _run("ss", "-tin", "src", self.host)
            sockets += "".join(_run(*network.command, "ss", "-tin") for network in self.networks)
            return "backoff:" not in sockets

        eventually(resent, timeout_s=20, what="all lost packets resent")

    def remove(self) -> None:
        for name in self._names:
            with contextlib.suppress(AssertionError):
                _ip("netns", "del", name)
        for link in (*self._links, self._bridge):  # a veth may outlive its namespace briefly
            with contextlib.suppress(AssertionError):
                _ip("link", "del", link)


@contextlib.contextmanager
def namespaces(num: int, environment: dict[str, str]) -> Iterator[Namespaces]:
    """Create `num` namespaces for the block. Skip the test without root or iproute2.

    Args:
        environment: environment variables of pods in the namespaces.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("no `ip` on this machine: install iproute2")
    made = Namespaces(num, environment)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
