"""Check whether gateways are connected to all engines, by the gateways' metrics."""

from __future__ import annotations

import aiohttp

from baton_local.service_status import PodStatus
from baton_protocol.options.config import GATEWAY_METRICS_PORT


async def are_gateways_connected(pods: list[PodStatus]) -> bool:
    """Return whether every ready gateway is connected to all ready engines.

    A gateway connects to an engine shortly after the engine becomes ready. The result is False if
    no gateway is ready, or if the metrics of a gateway cannot be read.
    """
    gateways = [pod for pod in pods if pod.role == "gateway" and pod.ready]
    try:
        metrics = [await _metrics(pod) for pod in gateways]
    except (aiohttp.ClientError, TimeoutError):  # for example during a restart
        return False
    return bool(gateways) and all(
        _num_engines_ready(text, role) >= sum(pod.ready for pod in pods if pod.role == role)
        for text in metrics
        for role in ("prefill", "decode")
    )


async def _metrics(gateway: PodStatus) -> str:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
        session.get(f"http://{gateway.ip}:{GATEWAY_METRICS_PORT}/metrics") as response,
    ):
        return await response.text()


def _num_engines_ready(metrics: str, role: str) -> float:
    """Return the number of ready engines of `role` in a gateway's metrics.

    The result is 0 if the metric is missing.
    """
    name = f'baton:engines_ready{{role="{role}"}} '
    values = [line.removeprefix(name) for line in metrics.splitlines() if line.startswith(name)]
    return float(values[0]) if values else 0.0
