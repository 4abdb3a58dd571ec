"""What a service was before: the specs that were rolled out, as ControllerRevisions.

A pause keeps to the newest of them, and a user can go back to one (docs/operations.md). Sizes are no part of what is compared: they
change without a rollout, and are the user's or an autoscaler's in a pause, too. `status.specRevision` names what was recorded last,
so a service at rest costs no request.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec

from baton_kube.client import KubeError
from baton_operator import names
from baton_operator.api import decode_spec
from baton_operator.builders.owner import Owner, controlled_by
from baton_operator.kube import Kube

Object = dict[str, Any]

LIMIT = 10
"""Older ones are deleted."""

_NEVER_ROLLED_OUT = (
    ("paused",),
    ("updateStrategy",),
    ("progressDeadlineSeconds",),
    *((group, field) for group in ("prefill", "decode", "gateway") for field in ("replicas", "autoscaling")),
)
"""Fields that no pod is made of."""


def name_of(service: Object) -> str:
    """Of the record of its spec: the same for specs that would make the same pods."""
    spec = copy.deepcopy(service["spec"])
    for path in _NEVER_ROLLED_OUT:
        _put(spec, path, None)
    return f"{service['metadata']['name']}-{names.content_hash(spec)}"


async def record(kube: Kube, owner: Owner, service: Object) -> str:
    """Makes the spec the newest of the recorded ones, and forgets those beyond LIMIT.

    Returns:
        Its name, for `status.specRevision`.

    Raises:
        KubeError: it could not be written.
    """
    name = name_of(service)
    if recorded_name(service) == name:
        return name
    known = await _recorded(kube, service)
    newest = known[-1]["revision"] if known else 0
    present = next((each for each in known if each["metadata"]["name"] == name), None)
    if present is not None and present["revision"] != newest:  # the service went back to it
        # Made anew: API servers compare the data byte by byte, and refuse a patch that writes the same in another order of fields.
        await kube.delete("ControllerRevision", owner.namespace, name, present["metadata"]["uid"])
        known.remove(present)
        present = None
    if present is None:
        await _create(kube, owner, name, newest + 1, service["spec"])
    others = [each["metadata"] for each in known if each is not present]
    for metadata in others[: max(0, len(others) + 1 - LIMIT)]:
        await kube.delete("ControllerRevision", owner.namespace, metadata["name"], metadata["uid"])
    return name


async def kept_spec(kube: Kube, service: Object) -> Object | None:
    """The spec of a paused service: what was rolled out last, in the sizes wanted now. None: nothing was, or its record is gone.

    Raises:
        KubeError: the records cannot be read.
    """
    known = await _recorded(kube, service)
    if not known or recorded_name(service) not in (None, *(each["metadata"]["name"] for each in known)):
        return None
    # A role that the spec no longer has keeps its size.
    size = ((service.get("status") or {}).get("prefill") or {}).get("desired", 0)
    return with_sizes(known[-1]["data"]["spec"], {"prefill": {"replicas": size}, **service["spec"]})


def with_sizes(recorded: Object, wanted: Object) -> Object:
    """Return a copy of `recorded` with the sizes, the update strategy and `paused` of `wanted`: no pod is made of them."""
    spec = copy.deepcopy(recorded)
    for path in _NEVER_ROLLED_OUT:
        if path[0] in wanted or len(path) == 1:
            _put(spec, path, _get(wanted, path))
    return dict(spec)


def held_back(kept: Object, wanted: Object) -> tuple[str, ...]:
    """Edits that a pause keeps waiting: fields, such as `image` and `decode.template`, in which the specs would make other pods."""
    try:  # what is left out and what is written as the default are the same
        kept, wanted = (msgspec.to_builtins(decode_spec(spec)) for spec in (kept, wanted))
    except ValueError:  # msgspec.ValidationError is one
        kept, wanted = copy.deepcopy(kept), copy.deepcopy(wanted)
    for path in _NEVER_ROLLED_OUT:
        _put(kept, path, None)
        _put(wanted, path, None)
    return tuple(sorted(_differences(kept, wanted)))


def _differences(kept: Object, wanted: Object, above: str = "") -> Iterator[str]:
    """Two levels deep."""
    for field in kept.keys() | wanted.keys():
        ours, theirs = kept.get(field), wanted.get(field)
        if ours == theirs:
            continue
        if isinstance(ours, dict) and isinstance(theirs, dict) and not above:
            yield from _differences(ours, theirs, f"{field}.")
        else:
            yield f"{above}{field}"


async def recorded_spec(kube: Kube, service: Object, name: str) -> Object | None:
    """That of the record of this name; None if it was forgotten. Raises KubeError."""
    known = await _recorded(kube, service)
    return next((dict(each["data"]["spec"]) for each in known if each["metadata"]["name"] == name), None)


def recorded_name(service: Object) -> str | None:
    """As its status says."""
    return (service.get("status") or {}).get("specRevision")


async def _recorded(kube: Kube, service: Object) -> list[Object]:
    """In the order in which they were rolled out."""
    metadata = service["metadata"]
    mine = {names.LABEL_SERVICE: metadata["name"]}
    found = await kube.list_all("ControllerRevision", metadata["namespace"], mine)
    usable = [each for each in found if controlled_by(each, metadata["uid"]) and "spec" in (each.get("data") or {})]
    return sorted(usable, key=lambda each: (each["revision"], each["metadata"]["name"]))


async def _create(kube: Kube, owner: Owner, name: str, revision: int, spec: Object) -> None:
    record = {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": owner.metadata(name),
        "revision": revision,
        "data": {"spec": spec},
    }
    try:
        await kube.create(record)
    except KubeError as error:
        if error.reason != "AlreadyExists":  # someone else's, which is not used, or ours that a lost answer hid
            raise


def _get(spec: Any, path: tuple[str, ...]) -> Any:
    for field in path:
        spec = spec.get(field) if isinstance(spec, dict) else None
    return spec


def _put(spec: Any, path: tuple[str, ...], value: Any) -> None:
    """None removes the field; a parent that is missing stays so."""
    *parents, field = path
    for parent in parents:
        spec = spec.get(parent) if isinstance(spec, dict) else None
    if not isinstance(spec, dict):
        return
    if value is None:
        spec.pop(field, None)
    else:
        spec[field] = value
