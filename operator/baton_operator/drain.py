"""Asks an engine to drain, over its HTTP API."""

from __future__ import annotations

import logging

import aiohttp

from baton_engine.protocol.config import ENGINE_HTTP_PORT
from baton_engine.protocol.service_key import ServiceKey
from baton_operator import names

log = logging.getLogger(__name__)
TIMEOUT_S = 3.0


class Drainer:
    """POST /drain is idempotent: the first call starts the drain, every call answers how much is unfinished."""

    def __init__(self, session: aiohttp.ClientSession, port: int = ENGINE_HTTP_PORT) -> None:
        self._session = session
        self._port = port

    async def drain(self, host: str, key: ServiceKey | None = None) -> int | None:
        """Unfinished requests and transfers of the engine at `host`; None if it did not answer, or has another key."""
        authority = f"{names.url_host(host)}:{self._port}"
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.post(
                f"http://{authority}/drain", headers=authorization(key), timeout=timeout
            ) as response:
                response.raise_for_status()
                return int((await response.json())["unfinished"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            log.warning("%s did not answer POST /drain: %s", authority, error or type(error).__name__)
            return None


def authorization(key: ServiceKey | None) -> dict[str, str]:
    """HTTP headers that prove the service's key."""
    return {"Authorization": key.bearer} if key is not None else {}
