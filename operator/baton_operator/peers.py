"""Asks engines with whom they can exchange KV blocks. An engine process says the same as long as it lives, so it is asked once."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import aiohttp

from baton_engine.protocol.config import ENGINE_HTTP_PORT
from baton_engine.protocol.kv_compatibility import KVCompatibility
from baton_operator import names
from baton_operator.builders.member import CONTAINER
from baton_operator.loading import get_health
from baton_operator.names import Key
from baton_operator.observe import is_ready

Object = dict[str, Any]

CONCURRENCY = 16
"""Questions at the same time, of all services."""


class _Instance(NamedTuple):
    """One process of one pod."""

    uid: str
    started: str


class KVPeers:
    """HTTP client for `GET /health` of members that serve."""

    def __init__(self, session: aiohttp.ClientSession, port: int = ENGINE_HTTP_PORT) -> None:
        self._session = session
        self._port = port
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._known: dict[Key, dict[_Instance, KVCompatibility | None]] = {}
        """None: it answered, and exchanges no blocks or is too old to say so."""

    async def ask(self, key: Key, pods: list[Object]) -> dict[str, KVCompatibility]:
        """What the service's members that are ready say, by pod name. Who does not answer or does not say is left out."""
        asked = {_instance(pod): pod for pod in pods if _is_member(pod) and is_ready(pod)}
        known = self._known.get(key, {})
        new = [instance for instance in asked if instance not in known]
        answers = await asyncio.gather(*(self._compatibility(asked[instance]) for instance in new))
        # Those that are gone are forgotten.
        known = {instance: known[instance] for instance in asked if instance in known}
        for instance, answer in zip(new, answers, strict=True):
            if answer is not None:
                known[instance] = answer[0]
        self._known[key] = known
        return {asked[instance]["metadata"]["name"]: kv for instance, kv in known.items() if kv is not None}

    def forget(self, key: Key) -> None:
        """The service is gone, or has one kind of members only."""
        self._known.pop(key, None)

    async def _compatibility(self, pod: Object) -> tuple[KVCompatibility | None] | None:
        """None: no answer."""
        host = (pod.get("status") or {}).get("podIP")
        if not host:
            return None
        async with self._slots:
            health = await get_health(self._session, host, self._port)
        return None if health is None else (health.kv,)


def _is_member(pod: Object) -> bool:
    return pod["metadata"]["labels"].get(names.LABEL_ROLE) in names.MEMBER_ROLES


def _instance(pod: Object) -> _Instance:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    engine: Object = next((each for each in containers if each["name"] == CONTAINER), {})
    started = ((engine.get("state") or {}).get("running") or {}).get("startedAt", "")
    return _Instance(str(pod["metadata"].get("uid", "")), f"{engine.get('restartCount', 0)} {started}")
