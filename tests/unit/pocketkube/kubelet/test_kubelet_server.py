"""The kubelet's server: clients without a certificate, the summary, and invalid requests."""

from pathlib import Path

import aiohttp
import pytest

from pocketkube.certificates import create_certificates
from pocketkube.kubelet import stats_summary
from support.pocketkube.kubelet_client import V4, V5, Kubelet, client_context


@pytest.mark.parametrize("has_certificate", [False, True])
async def test_clients_without_a_certificate_of_the_cluster_are_refused(
    kubelet: Kubelet, tmp_path: Path, has_certificate: bool
) -> None:
    other = create_certificates(tmp_path / "other", []) if has_certificate else None
    connector = aiohttp.TCPConnector(ssl=client_context(other))
    async with aiohttp.ClientSession(connector=connector) as session:
        for path in (
            "/containerLogs/ns/p/main",
            "/exec/ns/p/main?command=id&output=1",
            "/stats/summary",
        ):
            with pytest.raises(aiohttp.ClientError):
                await session.get(kubelet.server + path)


async def test_the_summary_has_the_usage_of_the_running_container(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_summary, "WINDOW_S", 0.01)
    async with kubelet.session.get(f"{kubelet.server}/stats/summary") as response:
        summary = await response.json()
    assert summary["node"]["nodeName"] == "n"
    [pod] = summary["pods"]
    assert pod["podRef"] == {"namespace": "ns", "name": "p", "uid": "u"}
    [container] = pod["containers"]
    assert container["name"] == "main"
    assert 0 < container["memory"]["workingSetBytes"] < summary["node"]["memory"]["workingSetBytes"]


async def test_requests_without_a_known_pod_command_or_protocol_are_refused(
    kubelet: Kubelet,
) -> None:
    for path, protocol, status in (
        ("/exec/ns/other/main?command=true", V5, 404),
        ("/exec/ns/p/main", V5, 400),
        ("/exec/ns/p/main?command=true", "v9.channel.k8s.io", 400),
        ("/portForward/ns/p?port=http", V4, 400),
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await kubelet.connect(path, protocol)
        assert refused.value.status == status, path
