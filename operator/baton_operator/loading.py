"""Asks pods that are not ready how far they are: the fetcher of the model, and then the engine that loads it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
        answers = await asyncio.gather(
            *(get_health(self._session, pod["status"]["podIP"], self._port) for pod in asked)
        )
        return {
            pod["metadata"]["name"]: health
            for pod, health in zip(asked, answers, strict=True)
            if health is not None and health.reason in STATIONS
        }


async def get_health(session: aiohttp.ClientSession, host: str, port: int) -> Health | None:
    """What the pod at `host` says; None if there is no answer, or none that can be read."""
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with session.get(f"http://{authority}/health", timeout=timeout) as response:
            return msgspec.json.decode(await response.content.read(MAX_BODY_BYTES), type=Health)
    except (
        aiohttp.ClientError,
        TimeoutError,
        OSError,
        msgspec.DecodeError,
    ):  # it starts, or is another kind of process
        return None


def will_tell(pods: list[Object], told: Mapping[str, Health]) -> bool:
    """Whether asking again in a moment may bring news that no event does: one told how far it is, or has begun to run and is
    silent as yet."""
    return bool(told) or any(_may_load(pod) and _begins(pod) for pod in pods)


def _begins(pod: Object) -> bool:
    """A fetcher runs, or an engine that has not passed its startup probe, which asks for /health as we do."""
    status = pod.get("status") or {}
    engines = [each for each in status.get("containerStatuses") or [] if not each.get("started")]
    running = [
        (each.get("state") or {}).get("running") for each in [*(status.get("initContainerStatuses") or []), *engines]
    ]
    return any(each is not None for each in running)


def _may_load(pod: Object) -> bool:
    status = pod.get("status") or {}
    member = pod["metadata"]["labels"].get(names.LABEL_ROLE) in names.MEMBER_ROLES
    return member and bool(status.get("podIP")) and not is_ready(pod) and not leaving(pod)
