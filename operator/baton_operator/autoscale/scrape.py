"""Scrape the metrics of pods over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import msgspec
from prometheus_client import Counter

from baton_kube.client import read_body
from baton_operator.autoscale.windows import ScrapedSample, sample
from baton_operator.names import MemberRole, url_host

#: Maximum number of concurrent scrapes: of all services, and of one service.
CONCURRENCY, SERVICE_CONCURRENCY = 32, 8
TIMEOUT_S = 5.0
MAX_BYTES = 2**20


class ScrapeTarget(msgspec.Struct, frozen=True):
    """One container whose metrics are scraped."""

    pod: str
    #: Id of the container, as in `windows.Snapshot.samples`.
    container: str
    #: Role of the engine. None: a gateway.
    role: MemberRole | None
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{url_host(self.host)}:{self.port}/metrics"


class Scraped(msgspec.Struct, frozen=True):
    """The samples and errors from scraping each target once."""

    #: Id of the container -> sample.
    samples: dict[str, ScrapedSample]
    #: Name of the pod -> why it has no sample.
    errors: dict[str, str]


class Scraper:
    """Scrapes the metrics of pods over one HTTP session.

    Args:
        results: counter of scrapes, with the label values `ok` and `error`.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        results: Counter,
        *,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._session = session
        self._results = results
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    async def scrape(self, targets: Iterable[ScrapeTarget]) -> Scraped:
        """Scrape all targets concurrently. Failed scrapes are in `errors` of the result."""
        scraped = Scraped({}, {})
        slots = asyncio.Semaphore(SERVICE_CONCURRENCY)

        async def ask(target: ScrapeTarget) -> None:
            try:
                async with slots, self._slots:
                    scraped.samples[target.container] = await self._scrape(target)
                self._results.labels("ok").inc()
            except (aiohttp.ClientError, OSError, ValueError) as error:
                scraped.errors[target.pod] = str(error) or f"no answer within {self._timeout_s:g} s"
                self._results.labels("error").inc()

        await asyncio.gather(*map(ask, targets))
        return scraped

    async def _scrape(self, target: ScrapeTarget) -> ScrapedSample:
        """Scrape one target, and return the parsed metrics.

        Raises:
            aiohttp.ClientError, OSError: there was no response.
            ValueError: the response is an error, exceeds a limit or contains no metrics.
        """
        request = self._session.get(target.url, allow_redirects=False)
        async with asyncio.timeout(self._timeout_s), request as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status} from {target.url}")
            body = await read_body(response, self._max_bytes)
        return await asyncio.get_running_loop().run_in_executor(
            self._parser, lambda: sample(target.role, body.decode())
        )
