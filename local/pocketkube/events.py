"""Events for `kubectl describe`. A repetition within ten minutes raises the count of its event."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass

from baton_kube.client import KubeClient, KubeError, Object
from pocketkube.timestamps import timestamp

logger = logging.getLogger(__name__)

REPEAT_WINDOW_S = 600.0
#: Longest message. The API server refuses longer ones.
MESSAGE_LIMIT = 1024


@dataclass
class _Series:
    """The Event that counts the repetitions of one message."""

    name: str
    count: int
    last: float


class EventRecorder:
    """Writes core/v1 Events in the background. A failed write is logged, not raised."""

    def __init__(self, api: KubeClient, component: str, host: str = "") -> None:
        self._api = api
        self._source = {"component": component, "host": host} if host else {"component": component}
        self._series: dict[str, _Series] = {}
        self._queue: asyncio.Queue[tuple[Object, str, str, str, str]] = asyncio.Queue(maxsize=1000)

    def record(
        self,
        obj: Object,
        kind: str,
        reason: str,
        message: str,
        *,
        field_path: str = "",
        api_version: str = "v1",
    ) -> None:
        """Queue an event. Its type is Warning for a reason in `WARNINGS`, else Normal."""
        reference = {
            "kind": kind,
            "apiVersion": api_version,
            "name": obj["metadata"]["name"],
            "namespace": obj["metadata"].get("namespace"),
            "uid": obj["metadata"].get("uid"),
            "resourceVersion": obj["metadata"].get("resourceVersion"),
            "fieldPath": field_path or None,
        }
        event_type = "Warning" if reason in WARNINGS else "Normal"
        try:
            self._queue.put_nowait(
                (
                    {k: v for k, v in reference.items() if v},
                    event_type,
                    reason,
                    message[:MESSAGE_LIMIT],
                    timestamp(),
                )
            )
        except asyncio.QueueFull:
            logger.warning(
                "Event %s of %s is lost, because too many Events wait to be written: %s",
                reason,
                obj["metadata"]["name"],
                message,
            )

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            reference, event_type, reason, message, when = await self._queue.get()
            try:
                await self._write(reference, event_type, reason, message, when)
            except (KubeError, OSError) as error:
                logger.warning(
                    "could not write event %s of %s: %s", reason, reference["name"], error
                )

    async def _write(
        self, reference: Object, event_type: str, reason: str, message: str, when: str
    ) -> None:
        now = time.monotonic()
        self._series = {
            key: series
            for key, series in self._series.items()
            if now - series.last < REPEAT_WINDOW_S
        }
        namespace = reference.get("namespace", "default")
        collection = f"/api/v1/namespaces/{namespace}/events"
        key = "|".join((reference.get("uid", ""), reference.get("fieldPath", ""), reason, message))
        series = self._series.get(key)
        if series is not None:
            series.count += 1
            series.last = now
            try:
                await self._api.merge(
                    f"{collection}/{series.name}", {"count": series.count, "lastTimestamp": when}
                )
                return
            except KubeError as error:
                if error.status != 404:  # 404: the event has expired; write a new one
                    raise
        digest = hashlib.sha256(f"{key}|{time.time_ns()}".encode()).hexdigest()[:16]
        series = _Series(f"{reference['name'][:200]}.{digest}", 1, now)
        self._series[key] = series
        event: Object = {
            "kind": "Event",
            "apiVersion": "v1",
            "metadata": {"name": series.name, "namespace": namespace},
            "involvedObject": reference,
            "type": event_type,
            "reason": reason,
            "message": message,
            "source": self._source,
            "count": 1,
            "firstTimestamp": when,
            "lastTimestamp": when,
        }
        await self._api.create(collection, event)


WARNINGS = frozenset(
    {
        "BackOff",
        "BindFailed",
        "Failed",
        "FailedCreate",
        "FailedMount",
        "FailedScheduling",
        "Unhealthy",
        "UnsupportedProtocol",
    }
)
