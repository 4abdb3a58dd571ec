"""The real control plane refuses other users of the machine."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from pocketkube.control_plane.real import RealControlPlane, find_assets
from support.operator.operator_process import needs_api_server

#: The range of all keys, for etcd's JSON gateway.
ALL_KEYS = json.dumps({"key": "AA==", "range_end": "AA=="}).encode()


def listening_ports(name: str) -> list[int]:
    """Return the TCP ports on which child processes with this name listen."""
    return [
        connection.laddr.port
        for child in psutil.Process().children(recursive=True)
        if child.name() == name
        for connection in child.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


@needs_api_server
def test_etcd_refuses_clients_without_a_certificate(tmp_path: Path) -> None:
    """A client of etcd could create pods, which the kubelet runs as root."""
    assets = find_assets()
    assert assets
    plane = RealControlPlane(assets, tmp_path, has_controllers=False)
    plane.start()
    try:
        ports = listening_ports("etcd")
        assert len(ports) == 2, "one port for clients and one for peers"
        tls = ssl.create_default_context(cafile=str(tmp_path / "pki" / "ca.crt"))
        for port in ports:
            for scheme in ("http", "https"):
                for path, body in (("/v3/kv/range", ALL_KEYS), ("/version", None)):
                    attack = urllib.request.Request(f"{scheme}://127.0.0.1:{port}{path}", body)
                    with pytest.raises((OSError, http.client.HTTPException)) as refused:
                        urllib.request.urlopen(attack, timeout=30, context=tls)
                    assert not isinstance(refused.value, urllib.error.HTTPError)
        # The keys must also be private.
        keys = list((tmp_path / "pki").glob("*.key"))
        assert len(keys) == 3
        assert all(key.stat().st_mode & 0o077 == 0 for key in keys)
    finally:
        plane.stop()
