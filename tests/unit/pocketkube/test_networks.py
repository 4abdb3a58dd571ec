"""Address ranges and ports of several clusters on one machine."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from contextlib import ExitStack, closing

import pytest

from pocketkube import loopback, networks
from pocketkube.loopback import served_port
from pocketkube.networks import NetworksInUseError, claim_networks

CLAIM = "import sys, time; from pocketkube.networks import claim_networks\n"
CLAIM += "held = claim_networks('embedded'); print(held.pods, flush=True); time.sleep(600)"


def test_clusters_on_one_machine_have_disjoint_ranges() -> None:
    with ExitStack() as stack:
        claims = [claim_networks(plane) for plane in ("embedded", "real", "embedded")]
        for claim in claims:
            stack.enter_context(closing(claim.claim))
        ranges = [
            ipaddress.ip_network(text) for claim in claims for text in (claim.pods, claim.services)
        ]
        assert not [(a, b) for i, a in enumerate(ranges) for b in ranges[:i] if a.overlaps(b)]


def test_more_clusters_than_ranges_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(networks, "CLUSTERS", 0)
    with pytest.raises(NetworksInUseError, match="end one of them"):
        claim_networks("embedded")


def test_ranges_of_a_killed_cluster_are_reused() -> None:
    holder = subprocess.Popen([sys.executable, "-c", CLAIM], stdout=subprocess.PIPE, text=True)
    held = holder.stdout.readline().strip()
    with closing(claim_networks("embedded").claim):
        holder.kill()
        holder.wait()
        again = claim_networks("embedded")
        again.release()
        assert again.pods == held


@pytest.mark.parametrize(
    ("capabilities", "reserved", "port"),
    [
        ("000001ffffffffff", "1024", 80),
        ("0000000000000400", "1024", 80),
        ("000001fffffffbff", "1024", 8080),
        ("0000000000000000", "1024", 8080),
        ("0000000000000000", "0", 80),
    ],
)
def test_a_port_that_may_not_be_bound_is_served_at_8080(
    monkeypatch, tmp_path, capabilities, reserved, port
) -> None:
    status = tmp_path / "status"
    status.write_text(f"CapPrm:\t0000000000000000\nCapEff:\t{capabilities}\n")
    setting = tmp_path / "ip_unprivileged_port_start"
    setting.write_text(reserved)
    monkeypatch.setattr(loopback, "_UNPRIVILEGED_PORTS", setting)
    monkeypatch.setattr(loopback, "_STATUS", status)
    assert served_port(80) == port
    assert served_port(8000) == 8000
