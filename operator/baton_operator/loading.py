"""Asks pods that are not ready how far they are: the fetcher of the model, and then the engine that loads it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from baton_engine.protocol.config import ENGINE_HTTP_PORT
from baton_engine.protocol.progress import Health
from baton_operator import names
from baton_operator.diagnose import leaving
from baton_operator.observe import is_ready

Object = dict[str, Any]

TIMEOUT_S = 1.0
MAX_ASKED = 16
"""Of one service in one reconcile: conditions tell of the first ones."""
MAX_BODY_BYTES = 16 * 2**10
STATIONS = ("Fetching", "Loading")


class LoadingPods:
    """HTTP client for `GET /health` of members."""

    def __init__(self, session: aiohttp.ClientSession, port: int = ENGINE_HTTP_PORT) -> None:
        self._session = session
        self._port = port

    async def ask(self, pods: list[Object]) -> dict[str, Health]:
        """What members that run but are not ready say, by pod name. Who does not answer, or is past it, is left out."""
        asked = sorted(filter(_may_load, pods), key=lambda pod: str(pod["metadata"]["name"]))[:MAX_ASKED]
        answers = await asyncio.gather(*(self._health(pod["status"]["podIP"]) for pod in asked))
        return {
            pod["metadata"]["name"]: health
            for pod, health in zip(asked, answers, strict=True)
            if health is not None and health.reason in STATIONS
        }

    async def _health(self, host: str) -> Health | None:
        authority = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.get(f"http://{authority}/health", timeout=timeout) as response:
                return msgspec.json.decode(await response.content.read(MAX_BODY_BYTES), type=Health)
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            msgspec.DecodeError,
        ):  # it starts, or is another kind of process
            return None


def _may_load(pod: Object) -> bool:
    status = pod.get("status") or {}
    member = pod["metadata"]["labels"].get(names.LABEL_ROLE) in names.MEMBER_ROLES
    return member and bool(status.get("podIP")) and not is_ready(pod) and not leaving(pod)
