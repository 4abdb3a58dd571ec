"""HTTP clients of engines and of the coordinator. All requests are idempotent."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TypeVar

import aiohttp
import msgspec

from baton_kube.client import error_text, read_body
from baton_operator import names
from baton_protocol.options.config import ENGINE_HTTP_PORT
from baton_protocol.service_key import AdminRequest, ServiceKey
from baton_protocol.topology import COORDINATOR_HTTP_PORT, TopologyRequest, TopologyStatus

logger = logging.getLogger(__name__)
TIMEOUT_S = 3.0
#: After a timeout, an address gets no request for this many seconds, because each wait delays
#: other services.
SILENT_S = 5.0
MAX_BODY_BYTES = 2**20

_Reply = TypeVar("_Reply")


class _PodClient:
    """Sends requests to components of one kind over one HTTP session."""

    component: str  #: Name of the components in log lines.
    #: Whether the signature of a request covers the address. True for the address of a pod, which
    #: another pod may have by now.
    is_bound_to_pod: bool
    port: int  #: Port on which the components listen, unless the constructor gets another one.

    def __init__(self, session: aiohttp.ClientSession, port: int | None = None) -> None:
        self._session = session
        self._port = port or self.port
        self._silent_until: dict[str, float] = {}  # by authority, monotonic

    async def _request(
        self,
        method: str,
        host: str,
        path: str,
        key: ServiceKey | None,
        reply: type[_Reply],
        body: bytes | None = None,
    ) -> _Reply | None:
        """Send a request, and return the decoded body of a response with status 200.

        None: there was no such response. A log line gives the reason. In the SILENT_S seconds after
        a timeout, None is returned without a request and without a log line.
        """
        authority, now = f"{names.url_host(host)}:{self._port}", monotonic()
        self._silent_until = {
            each: until for each, until in self._silent_until.items() if now < until
        }
        if authority in self._silent_until:
            return None
        headers = {}
        if key is not None:
            signed = AdminRequest(method, path, host if self.is_bound_to_pod else "", body or b"")
            headers["Authorization"] = key.sign(signed)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.request(
                method,
                f"http://{authority}{path}",
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                data = await read_body(response, MAX_BODY_BYTES)
                if response.status == 200:
                    return msgspec.json.decode(data, type=reply)
                text = data[:1000].decode(errors="replace")
                what, why = "refused", f"HTTP {response.status}: {text}"
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            if isinstance(error, TimeoutError):
                self._silent_until[authority] = monotonic() + SILENT_S
            what, why = "did not answer", error_text(error)
        logger.warning(
            "the %s at %s %s %s %s, which the next reconcile repeats: %s",
            self.component,
            authority,
            what,
            method,
            path,
            why,
        )
        return None


class _Drain(msgspec.Struct):
    unfinished: int


class Drainer(_PodClient):
    """HTTP client of engines, for draining them."""

    component = "engine"
    is_bound_to_pod = True
    port = ENGINE_HTTP_PORT

    async def drain(self, host: str, key: ServiceKey | None = None) -> int | None:
        """Start to drain the engine at `host`, unless it is draining already.

        Return the engine's number of unfinished requests and transfers; None without a valid reply.
        """
        reply = await self._request("POST", host, "/drain", key, _Drain)
        return None if reply is None else reply.unfinished


class CoordinatorClient(_PodClient):
    """HTTP client of the coordinators of expert-parallel groups."""

    component = "coordinator"
    is_bound_to_pod = False
    port = COORDINATOR_HTTP_PORT

    async def topology(self, host: str, key: ServiceKey | None = None) -> TopologyStatus | None:
        """Return the topology from the coordinator at `host`; None without a valid reply."""
        return await self._request("GET", host, "/topology", key, TopologyStatus)

    async def request_topology(
        self, host: str, request: TopologyRequest, key: ServiceKey | None = None
    ) -> TopologyStatus | None:
        """Request the coordinator at `host` to change the topology.

        Return the topology in the reply; None if there was no reply or the request was refused.
        """
        return await self._request(
            "PUT", host, "/topology", key, TopologyStatus, msgspec.json.encode(request)
        )
