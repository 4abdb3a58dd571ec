"""Optimistic concurrency: check that resourceVersion and uid of a request match the object."""

from __future__ import annotations

from pocketkube.apiserver import errors
from pocketkube.apiserver.resources import Object, Resource


def check_update(resource: Resource, stored: Object, given: Object) -> None:
    """Check that resourceVersion and uid of an update match the stored metadata.

    Args:
        stored: metadata of the stored object.
        given: metadata of the update. A missing or empty field matches any stored value, and so
            does resourceVersion 0.

    Raises:
        ApiError: 409, the object was changed or replaced since the client read it.
    """
    name = stored["name"]
    if given.get("resourceVersion") not in (None, "", "0", stored["resourceVersion"]):
        raise errors.conflict(resource, name)
    if given.get("uid") not in (None, "", stored["uid"]):
        raise errors.conflict(resource, name, _failed("UID", given["uid"], stored["uid"]))


def check_preconditions(
    resource: Resource, stored: Object, uid: str, resource_version: str
) -> None:
    """Check that the preconditions of a DELETE match the stored metadata.

    Args:
        stored: metadata of the stored object.
        uid: required uid; empty for any.
        resource_version: required resourceVersion; empty for any.

    Raises:
        ApiError: 409, a precondition does not match.
    """
    for given, actual, what in (
        (uid, stored["uid"], "UID"),
        (resource_version, stored["resourceVersion"], "ResourceVersion"),
    ):
        if given and given != actual:
            raise errors.conflict(resource, stored["name"], _failed(what, given, actual))


def _failed(what: str, given: str, actual: str) -> str:
    return f"Precondition failed: {what} in precondition: {given}, {what} in object meta: {actual}"
