"""The KV bytes that each engine has sent and received, as the engine's `/health` reports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import aiohttp
import msgspec

from baton_local.service_status import PodStatus, ServiceStatus
from baton_protocol.options.config import ENGINE_HTTP_PORT
from baton_protocol.process.health import Health


async def fetch_kv_bytes(status: ServiceStatus) -> ServiceStatus:
    """Return `status` with `kv_bytes` set in each pod whose engine answers `/health`."""
    pods = await asyncio.gather(*map(_with_kv_bytes, status.pods))
    return msgspec.structs.replace(status, pods=pods)


async def _with_kv_bytes(pod: PodStatus) -> PodStatus:
    if pod.role not in ("prefill", "decode") or not pod.ready:
        return pod
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(f"http://{pod.ip}:{ENGINE_HTTP_PORT}/health") as response,
        ):
            health = msgspec.json.decode(await response.read(), type=Health)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        # The engine is restarting, or runs another release of Baton.
        return pod
    return msgspec.structs.replace(pod, kv_bytes=health.kv_bytes)


def kv_bytes_received(pods: list[PodStatus]) -> Counter[str]:
    """Return the KV bytes that all decode pods together have received: transport -> bytes."""
    return sum((Counter(pod.kv_bytes) for pod in pods if pod.role == "decode"), Counter[str]())


def format_kv_bytes(nbytes: Mapping[str, int]) -> str:
    """Format the bytes of each transport: `1.25 MiB over ucx tcp/lo, 0.50 MiB over tcp sockets`."""
    return ", ".join(
        f"{count / 2**20:.2f} MiB over {transport}" for transport, count in sorted(nbytes.items())
    )
