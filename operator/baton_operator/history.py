"""What a service was before: the specs that were rolled out, as ControllerRevisions, and the members that one makes.

`status.specRevision` names the newest record, so a service at rest needs no request. A pause keeps to that record, and
a user can go back to any one (docs/operations.md). `status.servedRevision` names the record of the last spec with which
the whole service was ready. While another spec is rolled out, that is the former revision: `plan.py` says when members
of it are made again.

Sizes are not compared. They change without a rollout, and in a pause they still follow the user or an autoscaler.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from baton_kube.client import KubeError
from baton_operator import names
from baton_operator.api import decode_spec
from baton_operator.builders.config import config_map
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Object, Owner, controlled_by
from baton_operator.kube import Kube
from baton_operator.rules import valid_spec

LIMIT = 10  #: Older records are deleted.
#: Fields that no pod is made of: of the spec, and of each of its groups.
_OF_NO_POD = ("paused", "updateStrategy", "progressDeadlineSeconds")
_SIZES = ("replicas", "autoscaling")


class Former(msgspec.Struct, frozen=True):
    """What a member of the former revision is made of."""

    template: MemberTemplate
    config_map: Object


async def record(kube: Kube, owner: Owner, service: Object) -> str:
    """Make the spec the newest of the recorded ones, and delete those beyond LIMIT.

    Returns:
        Its name, for `status.specRevision`: the same for specs that would make the same pods.

    Raises:
        KubeError: it could not be written.
    """
    name = f"{owner.name}-{names.content_hash(_pod_fields(service['spec']))}"
    if recorded_name(service) == name:
        return name
    known = await _records(kube, service)
    newest = max((each["revision"] for each in known.values()), default=0)
    present = known.pop(name, None)
    if present is not None and present["revision"] != newest:  # the service went back to it
        # Not patched: API servers compare the data byte by byte, and refuse the same fields in another order.
        await kube.delete("ControllerRevision", owner.namespace, name, present["metadata"]["uid"])
        present = None
    if present is None:
        await _create(kube, owner, name, newest + 1, service["spec"])
    for metadata in [each["metadata"] for each in known.values()][: -(LIMIT - 1)]:
        await kube.delete("ControllerRevision", owner.namespace, metadata["name"], metadata["uid"])
    return name


async def kept_spec(kube: Kube, service: Object) -> Object | None:
    """Return the spec of a paused service: the last one that was rolled out, in the sizes wanted now.

    None: nothing was rolled out, or the record is gone.

    Raises:
        KubeError: the records cannot be read.
    """
    known = await _records(kube, service)
    if not known or recorded_name(service) not in (None, *known):
        return None
    newest = list(known.values())[-1]["data"]["spec"]
    # A role that the spec no longer has keeps its size.
    size = ((service.get("status") or {}).get("prefill") or {}).get("desired", 0)
    return with_sizes(newest, {"prefill": {"replicas": size}, **service["spec"]})


def with_sizes(recorded: Object, wanted: Object) -> Object:
    """Return `recorded` with the fields of `wanted` that no pod is made of: sizes, update strategy and `paused`."""
    spec = _pod_fields(recorded) | _set_fields(wanted, _OF_NO_POD)
    for group in names.CONFIGURED_ROLES:
        if isinstance(spec.get(group), dict):
            spec[group] |= _set_fields((wanted if group in wanted else recorded)[group], _SIZES)
    return spec


def held_back(kept: Object, wanted: Object) -> tuple[str, ...]:
    """Return the fields whose edits a pause holds back, like `image` and `decode.template`: pods are made of them."""
    with contextlib.suppress(
        ValueError
    ):  # a field that is left out and one that is written as the default are the same
        kept, wanted = (msgspec.to_builtins(decode_spec(spec)) for spec in (kept, wanted))
    kept, wanted = _pod_fields(kept), _pod_fields(wanted)
    fields = set()
    for field in kept.keys() | wanted.keys():
        ours, theirs = kept.get(field), wanted.get(field)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            fields |= {f"{field}.{each}" for each in ours.keys() | theirs.keys() if ours.get(each) != theirs.get(each)}
        elif ours != theirs:
            fields.add(field)
    return tuple(sorted(fields))


def recorded_name(service: Object) -> str | None:
    """The newest record, as the service's status says."""
    return (service.get("status") or {}).get("specRevision")


async def find_former(
    kube: Kube, owner: Owner, service: Object, newest: str | None, templates: dict[names.MemberRole, MemberTemplate]
) -> dict[names.MemberRole, Former]:
    """Return what members of the former revision are made of; see `former_of`.

    Args:
        newest: name of the record of the spec that is rolled out.
        templates: of the newest revision.

    Raises:
        KubeError: the records cannot be read.
    """
    name = (service.get("status") or {}).get("servedRevision")
    found = {} if name in (None, newest) else await _records(kube, service)
    return former_of(owner, found[name]["data"]["spec"], templates) if name in found else {}


def former_of(
    owner: Owner, spec: Object, templates: dict[names.MemberRole, MemberTemplate]
) -> dict[names.MemberRole, Former]:
    """By role; a role that is missing is not changed by the rollout, or its former members cannot be made again. Pure.

    Ranks of expert-parallel groups have none: a rank that is made must be able to join the topology.
    """
    former: dict[names.MemberRole, Former] = {}
    try:
        owner = msgspec.structs.replace(owner, spec=valid_spec(spec))
        for role, newest in templates.items():
            is_rank = newest.expert_group or owner.expert_group(role)
            if is_rank or (role == "prefill" and not owner.has_prefill):
                continue
            template = MemberTemplate(owner, role)
            if template.revision != newest.revision:
                former[role] = Former(template, config_map(owner, role))
    except ValueError:  # another version of the operator recorded it
        return {}
    return former


def _pod_fields(spec: Object) -> Object:
    """Return a copy of `spec` without the fields that no pod is made of."""
    fields = {field: value for field, value in spec.items() if field not in _OF_NO_POD}
    for group in names.CONFIGURED_ROLES:
        if isinstance(fields.get(group), dict):
            fields[group] = {field: value for field, value in fields[group].items() if field not in _SIZES}
    return fields


def _set_fields(node: Any, fields: tuple[str, ...]) -> Object:
    """Return those of `fields` that `node` has; none if it is no object."""
    return {field: node[field] for field in fields if node.get(field) is not None} if isinstance(node, dict) else {}


async def _records(kube: Kube, service: Object) -> dict[str, Object]:
    """By name, in the order in which they were rolled out."""
    metadata = service["metadata"]
    found = await kube.list_all("ControllerRevision", metadata["namespace"], {names.LABEL_SERVICE: metadata["name"]})
    usable = [each for each in found if controlled_by(each, metadata["uid"]) and "spec" in (each.get("data") or {})]
    usable.sort(key=lambda each: (each["revision"], each["metadata"]["name"]))
    return {each["metadata"]["name"]: each for each in usable}


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
