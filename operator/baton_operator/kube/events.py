"""Kubernetes Events about a service. A repeated Event increments the count of the stored Event."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator import names
from baton_operator.kube.objects import Kube

logger = logging.getLogger(__name__)
MAX_MESSAGE = 1024


class Event(msgspec.Struct, frozen=True):
    """A Kubernetes Event that is to be written."""

    reason: str
    message: str
    warning: bool = False


async def emit(kube: Kube, service: Object, event: Event) -> None:
    """Emit an Event about `service`: log it, and store it in the service's namespace.

    If the same Event is stored already, its count is increased. A message of more than MAX_MESSAGE
    characters is truncated. A failure to store the Event is logged and raises no error.
    """
    type_, level = ("Warning", logging.WARNING) if event.warning else ("Normal", logging.INFO)
    metadata = service["metadata"]
    reason, message = event.reason, event.message[:MAX_MESSAGE]
    name = f"{metadata['name']}.{names.content_hash([metadata['uid'], type_, reason, message])}"
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    service_id = {field: metadata[field] for field in ("name", "namespace", "uid")}
    stored = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": names.API_VERSION, "kind": names.KIND, **service_id},
        "type": type_,
        "reason": reason,
        "message": message,
        "source": {"component": names.MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    logger.log(level, "%s %s: %s", metadata["name"], reason, message)
    try:
        present = await kube.read("Event", metadata["namespace"], name)
        if present is None:
            await kube.create(stored)
        else:
            again = {"count": present.get("count", 1) + 1, "lastTimestamp": now}
            await kube.merge("Event", metadata["namespace"], name, again)
    except (KubeError, OSError) as error:
        logger.warning(
            "the Event %s of LLMService %s could not be written: %s",
            reason,
            metadata["name"],
            error,
        )
