"""Write Events. A message that repeats within ten minutes increments the count of its Event."""

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
#: Maximum number of characters of a message. The API server refuses longer messages.
MESSAGE_LIMIT = 1024
#: Reasons of events of type Warning. Events with any other reason have type Normal.
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


@dataclass
class _Series:
    """An Event in the API server, and the number of times that its message was recorded."""

    name: str
    count: int
    #: Monotonic time of the last record.
    last: float


class EventRecorder:
    """Writes core/v1 Events in the background. A failed write is logged, not raised."""

    def __init__(self, api: KubeClient, component: str, host: str = "") -> None:
        self._api = api
        self._source = {"component": component, "host": host} if host else {"component": component}
        self._series: dict[str, _Series] = {}
        self._queue: asyncio.Queue[Object] = asyncio.Queue(maxsize=1000)

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
        """Queue an Event about `obj`.

        The type of the Event is Warning if `reason` is in `WARNINGS`, else Normal.
        """
        metadata, when = obj["metadata"], timestamp()
        reference = {
            "kind": kind,
            "apiVersion": api_version,
            "name": metadata["name"],
            "namespace": metadata.get("namespace"),
            "uid": metadata.get("uid"),
            "resourceVersion": metadata.get("resourceVersion"),
            "fieldPath": field_path or None,
        }
        event: Object = {
            "kind": "Event",
            "apiVersion": "v1",
            "involvedObject": {key: value for key, value in reference.items() if value},
            "type": "Warning" if reason in WARNINGS else "Normal",
            "reason": reason,
            "message": message[:MESSAGE_LIMIT],
            "source": self._source,
            "count": 1,
            "firstTimestamp": when,
            "lastTimestamp": when,
        }
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            logger.warning(
                "Event %s of %s is dropped, because too many Events wait to be written: %s",
                reason,
                metadata["name"],
                message,
            )

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            event = await self._queue.get()
            try:
                await self._write(event)
            except (KubeError, OSError) as error:
                logger.warning(
                    "Event %s of %s is dropped, because it could not be written: %s",
                    event["reason"],
                    event["involvedObject"]["name"],
                    error,
                )

    async def _write(self, event: Object) -> None:
        """Create the event, or increment the count of a recent event with the same message."""
        now = time.monotonic()
        self._series = {
            key: series
            for key, series in self._series.items()
            if now - series.last < REPEAT_WINDOW_S
        }
        reference = event["involvedObject"]
        namespace = reference.get("namespace", "default")
        collection = f"/api/v1/namespaces/{namespace}/events"
        same = (reference.get("uid", ""), reference.get("fieldPath", ""))
        key = "|".join((*same, event["reason"], event["message"]))
        series = self._series.get(key)
        if series is not None:
            series.count += 1
            series.last = now
            try:
                await self._api.merge(
                    f"{collection}/{series.name}",
                    {"count": series.count, "lastTimestamp": event["lastTimestamp"]},
                )
                return
            except KubeError as error:
                if error.status != 404:  # 404: the event has expired; write a new one
                    raise
        digest = hashlib.sha256(f"{key}|{time.time_ns()}".encode()).hexdigest()[:16]
        series = _Series(f"{reference['name'][:200]}.{digest}", 1, now)
        self._series[key] = series
        event["metadata"] = {"name": series.name, "namespace": namespace}
        await self._api.create(collection, event)
