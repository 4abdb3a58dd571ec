"""Asks the coordinator of an expert-parallel group what is, and tells it what should be."""

from __future__ import annotations

import logging

import aiohttp
import msgspec

from baton_engine.protocol.service_key import ServiceKey
from baton_engine.protocol.topology import COORDINATOR_HTTP_PORT, TopologyRequest, TopologyStatus
from baton_operator import names
from baton_operator.drain import authorization

log = logging.getLogger(__name__)
TIMEOUT_S = 3.0


class CoordinatorClient:
    """Both calls answer the topology as it is then; None if there was no usable answer, and a log line says why."""

    def __init__(self, session: aiohttp.ClientSession, port: int = COORDINATOR_HTTP_PORT) -> None:
        self._session = session
        self._port = port

    async def topology(self, host: str, key: ServiceKey | None = None) -> TopologyStatus | None:
        return await self._ask(host, "GET", None, key)

    async def ask_for(
        self, host: str, request: TopologyRequest, key: ServiceKey | None = None
    ) -> TopologyStatus | None:
        """Repeating a request changes nothing."""
        return await self._ask(host, "PUT", msgspec.json.encode(request), key)

    async def _ask(self, host: str, method: str, body: bytes | None, key: ServiceKey | None) -> TopologyStatus | None:
        authority = f"{names.url_host(host)}:{self._port}"
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.request(
                method, f"http://{authority}/topology", data=body, headers=authorization(key), timeout=timeout
            ) as response:
                answer = await response.read()
                if response.status != 200:
                    text = answer.decode(errors="replace")
                    log.warning("%s refused %s /topology: HTTP %d: %s", authority, method, response.status, text)
                    return None
                return msgspec.json.decode(answer, type=TopologyStatus)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("%s did not answer %s /topology: %s", authority, method, error or type(error).__name__)
            return None
