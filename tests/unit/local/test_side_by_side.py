"""Several clusters on one machine, and users other than root: addresses, ports, the state folder."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from contextlib import ExitStack, closing

import pytest

from baton_local import loopback, networks
from baton_local.loopback import served_port
from baton_local.networks import NetworksInUseError, claim_networks
from baton_local.state import ClusterInfo, StateDir

CLAIM = "import sys, time; from baton_local.networks import claim_networks\n"
CLAIM += "held = claim_networks('embedded'); print(held.pods, flush=True); time.sleep(600)"


def test_clusters_side_by_side_share_no_address() -> None:
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
    with pytest.raises(NetworksInUseError, match="baton down"):
        claim_networks("embedded")


def test_ranges_of_a_killed_cluster_are_free_again() -> None:
    holder = subprocess.Popen([sys.executable, "-c", CLAIM], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    held = holder.stdout.readline().strip()
    with closing(claim_networks("embedded").claim):
        holder.kill()
        holder.wait()
        again = claim_networks("embedded")
        again.release()
        assert again.pods == held


@pytest.mark.parametrize(
    ("user", "reserved", "port"), [(0, "1024", 80), (1000, "1024", 8080), (1000, "0", 80)]
)
def test_a_port_kept_for_root_is_served_above(monkeypatch, tmp_path, user, reserved, port) -> None:
    setting = tmp_path / "ip_unprivileged_port_start"
    setting.write_text(reserved)
    monkeypatch.setattr(loopback, "_UNPRIVILEGED_PORTS", setting)
    monkeypatch.setattr(loopback.os, "geteuid", lambda: user)
    assert served_port(80) == port
    assert served_port(8000) == 8000


def test_the_state_folder_is_absolute_its_owners_and_needs_no_home(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_HOME", "state")
    monkeypatch.setattr(
        "pathlib.Path.home", lambda: pytest.fail("no HOME is needed where BATON_HOME is set")
    )
    state = StateDir()
    state.acquire()
    assert state.root == tmp_path / "state"
    assert state.root.stat().st_mode & 0o077 == 0, "pods' tokens lie in it"


def test_what_a_killed_supervisor_wrote_is_not_its_successors(tmp_path) -> None:
    state = StateDir(tmp_path)
    state.acquire()
    state.write_info(ClusterInfo(1, "/k", "embedded", "default", "demo", "/f"))
    assert state.read_info() is None
