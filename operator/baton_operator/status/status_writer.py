"""Writes the status of a service, and its Events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator.api.llmservice import Status
from baton_operator.kube.events import Event, Events
from baton_operator.kube.kinds import Kube


class StatusWriter:
    def __init__(self, kube: Kube, events: Events) -> None:
        self._kube = kube
        self._events = events

    async def write(self, service: Object, status: Status) -> Object | None:
        """Write the status. Return the written service; None if nothing changed or it is gone."""
        new = msgspec.to_builtins(status)
        if status.decode is None:  # no group was observed: the status of the groups stays
            new = {field: value for field, value in new.items() if value is not None}
        if _is_applied(service.get("status") or {}, new):
            return None
        metadata = service["metadata"]
        # A merge patch: null removes a field. The uid is a precondition: a successor of the same
        # name is not patched.
        patch = {"metadata": {"uid": metadata["uid"]}, "status": new}
        try:
            return await self._kube.merge(
                "LLMService", metadata["namespace"], metadata["name"], patch, "status"
            )
        except KubeError as error:
            if error.status != 404:  # the service was deleted after it was read
                raise
            return None

    async def emit(self, service: Object, events: Iterable[Event]) -> None:
        """Record Events of the service."""
        for event in events:
            await self._events.emit(service, event.reason, event.message, warning=event.warning)


def _is_applied(old: Any, new: Any) -> bool:
    """Return whether the merge patch `new` would change nothing.

    A null field equals an absent one.
    """
    if isinstance(new, dict) and isinstance(old, dict | None):
        return all(_is_applied((old or {}).get(field), value) for field, value in new.items())
    return bool(old == new)
