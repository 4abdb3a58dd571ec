"""Write the status of a service."""

from __future__ import annotations

from typing import Any

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator.api.llmservice import Status
from baton_operator.kube.objects import Kube


async def write_status(kube: Kube, service: Object, status: Status) -> Object | None:
    """Write the status if it has changed. Return the updated service.

    None: the status has not changed, or the service is deleted.
    """
    new = msgspec.to_builtins(status)
    if status.decode is None:  # no group was observed: the status of the groups stays
        new = {field: value for field, value in new.items() if value is not None}
    if _is_applied(service.get("status") or {}, new):
        return None
    metadata = service["metadata"]
    # In a merge patch, null removes a field. The uid is a precondition, so that a new service
    # with the same name is not patched.
    patch = {"metadata": {"uid": metadata["uid"]}, "status": new}
    try:
        return await kube.merge(
            "LLMService", metadata["namespace"], metadata["name"], patch, "status"
        )
    except KubeError as error:
        if error.status != 404:  # the service was deleted after it was read
            raise
        return None


def _is_applied(old: Any, new: Any) -> bool:
    """Return whether the merge patch `new` would leave `old` unchanged.

    A null field equals an absent field.
    """
    if isinstance(new, dict) and isinstance(old, dict | None):
        return all(_is_applied((old or {}).get(field), value) for field, value in new.items())
    return bool(old == new)
