"""The work queue of a controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton_kube.client import KubeError

logger = logging.getLogger(__name__)


class WorkQueue:
    """A queue of object keys, reconciled one at a time. Failed keys are retried with backoff."""

    def __init__(self, name: str, reconcile: Callable[[str], Awaitable[None]]) -> None:
        self._name = name
        self._reconcile = reconcile
        self._keys: dict[str, None] = {}
        self._filled = asyncio.Event()
        self._failures: dict[str, int] = {}

    def add(self, key: str) -> None:
        """Add `key` to the queue, unless it is in the queue."""
        self._keys[key] = None
        self._filled.set()

    async def run(self) -> None:
        """Reconcile queued keys until cancelled."""
        while True:
            await self._filled.wait()
            key = next(iter(self._keys), None)
            if key is None:
                self._filled.clear()
                continue
            del self._keys[key]
            try:
                await self._reconcile(key)
                self._failures.pop(key, None)
            except KubeError as error:
                # 404 and 409: the cache lags behind the API server.
                level = logging.INFO if error.status in (404, 409) else logging.WARNING
                self._retry(key, error, level)
            except OSError as error:  # the API server does not answer
                self._retry(key, error, logging.INFO)
            except Exception as error:
                self._retry(key, error, logging.ERROR)

    def _retry(self, key: str, error: Exception, level: int) -> None:
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(0.1 * 2**count, 10.0)
        logger.log(
            level,
            "reconciling %s %s failed, retrying in %.1f s: %s",
            self._name,
            key,
            delay,
            repr(error) if level == logging.ERROR else str(error) or repr(error),
            exc_info=level == logging.ERROR,
        )
        asyncio.get_running_loop().call_later(delay, self.add, key)
