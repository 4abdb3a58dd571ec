"""The revision history of a service: the specs that were rolled out, as ControllerRevisions.

`status.specRevision` names the newest record, so a service at rest needs no request. A pause keeps
that record, and a user can go back to any record (docs/operate/rollouts.md).
`status.servedRevision` names the record of the last spec with which the whole service was ready.
While another spec is rolled out, the spec of this record is the previous revision. `plan_group.py`
decides when its members are created again.

Sizes are not compared. They change without a rollout, and in a pause they still follow the user or
an autoscaler.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator import names
from baton_operator.api.llmservice import decode_spec
from baton_operator.api.rules import valid_spec
from baton_operator.builders.config import config_map
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService, controlled_by
from baton_operator.kube.kinds import Kube
from baton_operator.reconcile_problems import NameConflict

#: Number of records to keep.
LIMIT = 10
#: Fields of the spec that do not affect pods.
_NOT_OF_PODS = ("paused", "updateStrategy", "progressDeadlineSeconds")
#: Fields of a group that do not affect its pods.
_SIZE_FIELDS = ("replicas", "autoscaling")


class PreviousRevision(msgspec.Struct, frozen=True):
    """Template and ConfigMap of the members of the previous revision."""

    template: MemberTemplate
    config_map: Object


async def record(kube: Kube, resolved: ResolvedService, service: Object) -> str:
    """Record the spec as the newest one, and delete the oldest records beyond LIMIT.

    The record that served last is kept.

    Returns:
        The record's name, for `status.specRevision`. Specs that make the same pods have one name.

    Raises:
        KubeError: the record could not be written.
    """
    name = f"{resolved.name}-{names.content_hash(_pod_fields(service['spec']))}"
    if recorded_name(service) == name:
        return name
    known = await _records(kube, service)
    served = (service.get("status") or {}).get("servedRevision")
    newest = max((each["revision"] for each in known.values()), default=0)
    present = known.pop(name, None)
    if present is not None and present["revision"] != newest:  # the spec equals an older record
        # Not patched: API servers compare the data byte by byte, and refuse fields in another
        # order.
        await kube.delete(
            "ControllerRevision", resolved.namespace, name, present["metadata"]["uid"]
        )
        present = None
    if present is None:
        await _create(kube, resolved, service, name, newest + 1)
    for metadata in [
        known[each]["metadata"] for each in list(known)[: -(LIMIT - 1)] if each != served
    ]:
        await kube.delete(
            "ControllerRevision", resolved.namespace, metadata["name"], metadata["uid"]
        )
    return name


async def recorded_spec(kube: Kube, service: Object) -> Object | None:
    """Return the last spec that was rolled out, with the present sizes.

    It replaces a paused or an invalid spec. None: no spec was rolled out, or its record was
    deleted.

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
    """Return `recorded` with those fields of `wanted` that do not affect pods, such as sizes."""
    spec = _pod_fields(recorded) | _set_fields(wanted, _NOT_OF_PODS)
    for group in names.CONFIGURED_ROLES:
        if isinstance(spec.get(group), dict):
            sized = wanted if group in wanted else recorded
            spec[group] |= _set_fields(sized[group], _SIZE_FIELDS)
    return spec


def held_back(kept: Object, wanted: Object) -> tuple[str, ...]:
    """Return the edited fields that a pause holds back because they affect pods.

    Examples are `image` and `decode.template`.
    """
    with contextlib.suppress(ValueError):  # decoding fills in the defaults of omitted fields
        kept, wanted = (msgspec.to_builtins(decode_spec(spec)) for spec in (kept, wanted))
    kept, wanted = _pod_fields(kept), _pod_fields(wanted)
    fields = set()
    for field in kept.keys() | wanted.keys():
        ours, theirs = kept.get(field), wanted.get(field)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            fields |= {
                f"{field}.{each}"
                for each in ours.keys() | theirs.keys()
                if ours.get(each) != theirs.get(each)
            }
        elif ours != theirs:
            fields.add(field)
    return tuple(sorted(fields))


def recorded_name(service: Object) -> str | None:
    """Return the name of the newest record from the service's status."""
    return (service.get("status") or {}).get("specRevision")


async def find_previous_revisions(
    kube: Kube,
    resolved: ResolvedService,
    service: Object,
    newest: str | None,
    templates: dict[names.MemberRole, MemberTemplate],
) -> dict[names.MemberRole, PreviousRevision]:
    """Return template and ConfigMap of the previous revision by role; see `previous_revisions_of`.

    Args:
        newest: name of the record of the spec that is rolled out.
        templates: templates of the newest revision.

    Raises:
        KubeError: the records cannot be read.
    """
    name = (service.get("status") or {}).get("servedRevision")
    found = {} if name in (None, newest) else await _records(kube, service)
    if name not in found:
        return {}
    return previous_revisions_of(resolved, found[name]["data"]["spec"], templates)


def previous_revisions_of(
    resolved: ResolvedService, spec: Object, templates: dict[names.MemberRole, MemberTemplate]
) -> dict[names.MemberRole, PreviousRevision]:
    """Return template and ConfigMap by role, for roles that the rollout changes. Pure.

    Expert-parallel ranks are left out. A new rank must be able to join the topology, so it is
    always of the newest revision.
    """
    previous: dict[names.MemberRole, PreviousRevision] = {}
    try:
        resolved = msgspec.structs.replace(resolved, spec=valid_spec(spec))
        for role, newest in templates.items():
            is_rank = newest.expert_group or resolved.expert_group(role)
            if is_rank or (role == "prefill" and not resolved.has_prefill):
                continue
            template = MemberTemplate(resolved, role)
            if template.revision != newest.revision:
                previous[role] = PreviousRevision(template, config_map(resolved, role))
    except ValueError:  # another version of the operator recorded it
        return {}
    return previous


def _pod_fields(spec: Object) -> Object:
    """Return a copy of `spec` without the fields that do not affect pods."""
    fields = {field: value for field, value in spec.items() if field not in _NOT_OF_PODS}
    for group in names.CONFIGURED_ROLES:
        if isinstance(fields.get(group), dict):
            fields[group] = {
                field: value for field, value in fields[group].items() if field not in _SIZE_FIELDS
            }
    return fields


def _set_fields(node: Any, fields: tuple[str, ...]) -> Object:
    """Return the items of `fields` that `node` has; none if it is not an object."""
    return (
        {field: node[field] for field in fields if node.get(field) is not None}
        if isinstance(node, dict)
        else {}
    )


async def _records(kube: Kube, service: Object) -> dict[str, Object]:
    """Return the records of the service by name, oldest first."""
    metadata = service["metadata"]
    found = await kube.list_all(
        "ControllerRevision", metadata["namespace"], {names.LABEL_SERVICE: metadata["name"]}
    )
    usable = [
        each
        for each in found
        if controlled_by(each, metadata["uid"]) and "spec" in (each.get("data") or {})
    ]
    usable.sort(key=lambda each: (each["revision"], each["metadata"]["name"]))
    return {each["metadata"]["name"]: each for each in usable}


async def _create(
    kube: Kube, resolved: ResolvedService, service: Object, name: str, revision: int
) -> None:
    record = {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": resolved.metadata(name),
        "revision": revision,
        "data": {"spec": service["spec"]},
    }
    try:
        await kube.create(record)
    except KubeError as error:
        if error.reason != "AlreadyExists":
            raise
        # The existing record may have another owner, such as a deleted service of the same name.
        if name not in await _records(kube, service):
            raise NameConflict("ControllerRevision", name) from error
