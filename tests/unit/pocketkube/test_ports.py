"""Free ports for processes that are about to start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pocketkube import ports


@pytest.mark.parametrize(
    ("handed_out", "end"), [("32768\t60999\n", 32768), ("1024 65535", 65536), ("none", 65536)]
)
def test_ports_are_distinct_and_outside_the_ephemeral_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handed_out: str, end: int
) -> None:
    (tmp_path / "range").write_text(handed_out)
    monkeypatch.setattr(ports, "_HANDED_OUT", tmp_path / "range")
    found = ports.free_ports(20)
    assert len(set(found)) == 20
    assert max(found) < end


def test_a_port_with_a_listener_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    [taken] = ports.free_ports(1)
    monkeypatch.setattr(ports, "_FIRST", taken)
    # Makes `taken` always a candidate.
    monkeypatch.setattr(ports, "_first_handed_out", lambda: taken + 50)
    with socket.create_server((ports.LOOPBACK, taken)):
        assert all(taken not in ports.free_ports(1) for _ in range(10))
