"""Metadata that the server sets: clients can neither choose nor change it."""

from __future__ import annotations

import json
import secrets
import uuid

from pocketkube.apiserver import errors
from pocketkube.apiserver.resources import Object, Resource
from pocketkube.apiserver.schema import defaults
from pocketkube.timestamps import timestamp

#: The alphabet of Kubernetes' generateName: it has no vowels, so no suffix is a word.
_NAME_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


def generate_name(metadata: Object) -> None:
    """Set the name of a new object from its generateName, unless the object has a name."""
    if not metadata.get("name") and metadata.get("generateName"):
        suffix = "".join(secrets.choice(_NAME_ALPHABET) for _ in range(5))
        metadata["name"] = metadata["generateName"][:58] + suffix


def assign(resource: Resource, metadata: Object) -> None:
    """Set the metadata fields of a new object that clients cannot choose, such as uid.

    A value that the client sent for such a field is replaced or removed.
    """
    for name in (
        "resourceVersion",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "managedFields",
    ):
        metadata.pop(name, None)
    metadata["uid"] = str(uuid.uuid4())
    metadata["creationTimestamp"] = timestamp()
    if resource.custom or resource.kind in defaults.WITH_GENERATION:
        metadata["generation"] = 1


def restore(resource: Resource, before: Object, metadata: Object) -> None:
    """Restore the metadata fields that an update cannot change, such as uid.

    Args:
        before: the stored metadata.
        metadata: the metadata of the update, which is changed in place.

    Raises:
        ApiError: 422, the update adds a finalizer to an object that is being deleted.
    """
    for name in (
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "name",
        "namespace",
    ):
        metadata.pop(name, None)
        if name in before:
            metadata[name] = before[name]
    if before.get("deletionTimestamp"):
        added = set(metadata.get("finalizers") or ()) - set(before.get("finalizers") or ())
        if added:
            refused = errors.forbidden_value(
                "metadata.finalizers",
                "no new finalizers can be added if the object is being deleted, found new "
                f"finalizers {sorted(added)}",
            )
            raise errors.invalid(resource, before["name"], [refused])


def next_generation(resource: Resource, old: Object, new: Object) -> int:
    """Return the generation for `new`: that of `old`, plus 1 if the desired state has changed."""
    generation: int = old["metadata"]["generation"]
    return generation + (_desired(new, resource) != _desired(old, resource))


def _desired(obj: Object, resource: Resource) -> str:
    """Serialize the desired state of `obj`: the fields whose changes increment the generation."""
    skipped = {"metadata", "apiVersion", "kind"}
    if resource.has_status or not resource.custom:
        skipped.add("status")
    wanted = {key: value for key, value in obj.items() if key not in skipped}
    if resource.kind == "Deployment" and not resource.custom:
        # As in Kubernetes, a change of a Deployment's annotations increments the generation.
        wanted["annotations"] = obj["metadata"].get("annotations")
    return json.dumps(wanted, sort_keys=True)
