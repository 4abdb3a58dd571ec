"""The revision history of a service: one ControllerRevision, or record, per rolled-out spec.

- `status.specRevision` names the record of the spec that was rolled out last. A paused service
  stays at this record.
- `status.servedRevision` names the record of the last spec with which the whole service was ready.
  During a rollout, the spec in this record is the previous revision. `plan_group.py` decides when
  members of the previous revision are created.

A user can return to any record (docs/operate/rollouts.md). Specs that differ only in group sizes
share one record, because a new size needs no rollout.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from baton_kube.client import KubeError, Object
from baton_operator import names
from baton_operator.api.llmservice import decode_spec
from baton_operator.api.rules import valid_spec
from baton_operator.builders import config_maps
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService, controlled_by
from baton_operator.kube.objects import Kube
from baton_operator.reconcile_errors import NameConflict

#: Number of records to keep.
LIMIT = 10
#: Fields of the spec that do not affect pods.
_NOT_OF_PODS = ("paused", "updateStrategy", "progressDeadlineSeconds")
#: Fields of a group that do not affect its pods.
_SIZE_FIELDS = ("replicas", "autoscaling")


class PreviousRevision(msgspec.Struct, frozen=True):
    """The pod template and the ConfigMap with which pods of a previous revision are created."""

    template: MemberTemplate
    config_map: Object


async def record_spec(kube: Kube, resolved: ResolvedService, service: Object) -> str:
    """Store the service's spec as the newest ControllerRevision. Return its name.

    `status.specRevision` shows this name. Specs that result in equal pods share one
    ControllerRevision. Only the newest LIMIT ControllerRevisions and the one in
    `status.servedRevision` are kept.

    Raises:
        KubeError: the API server refused a request.
        NameConflict: a ControllerRevision of that name has another owner.
    """
    name = f"{resolved.name}-{names.content_hash(_pod_fields(service['spec']))}"
    if recorded_name(service) == name:
        return name
    known = await _records(kube, service)
    served = (service.get("status") or {}).get("servedRevision")
    newest = max((each["revision"] for each in known.values()), default=0)
    present = known.pop(name, None)
    if present is not None and present["revision"] != newest:  # the spec equals an older record
        # The record is created again and not patched. API servers refuse a patch whose data has
        # its fields in another order.
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
    """Return the last spec that was rolled out, with the group sizes of the service's spec.

    This spec is used while the service is paused, and instead of an invalid spec.

    Returns:
        None if no spec was rolled out, or if the ControllerRevision of that spec was deleted.

    Raises:
        KubeError: the ControllerRevisions cannot be read.
    """
    known = await _records(kube, service)
    if not known or recorded_name(service) not in (None, *known):
        return None
    newest = list(known.values())[-1]["data"]["spec"]
    # If the spec no longer has `prefill`, the prefill group keeps its size.
    size = ((service.get("status") or {}).get("prefill") or {}).get("desired", 0)
    return with_sizes(newest, {"prefill": {"replicas": size}, **service["spec"]})


def with_sizes(recorded: Object, wanted: Object) -> Object:
    """Return the spec `recorded` with the group sizes of the spec `wanted`.

    Fields such as `updateStrategy`, which do not affect pods, also come from `wanted`.
    """
    spec = _pod_fields(recorded) | _set_fields(wanted, _NOT_OF_PODS)
    for group in names.CONFIGURED_ROLES:
        if isinstance(spec.get(group), dict):
            sized = wanted if group in wanted else recorded
            spec[group] |= _set_fields(sized[group], _SIZE_FIELDS)
    return spec


def held_back(kept: Object, wanted: Object) -> tuple[str, ...]:
    """Return the fields whose edits wait until a pause ends, for example `decode.template`.

    These are the fields that affect pods and differ between `kept` and `wanted`.

    Args:
        kept: the spec that was rolled out last.
        wanted: the spec of the service.
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
    """Return `status.specRevision`; None if no spec was rolled out."""
    return (service.get("status") or {}).get("specRevision")


async def find_previous_revisions(
    kube: Kube,
    resolved: ResolvedService,
    service: Object,
    newest: str | None,
    templates: dict[names.MemberRole, MemberTemplate],
) -> dict[names.MemberRole, PreviousRevision]:
    """Return the previous revision, `status.servedRevision`, of each role that the rollout changes.

    Args:
        newest: name of the ControllerRevision of the spec that is rolled out.
        templates: templates of the newest revision.

    Raises:
        KubeError: the ControllerRevisions cannot be read.
    """
    name = (service.get("status") or {}).get("servedRevision")
    found = {} if name in (None, newest) else await _records(kube, service)
    if name not in found:
        return {}
    return previous_revisions_of(resolved, found[name]["data"]["spec"], templates)


def previous_revisions_of(
    resolved: ResolvedService, spec: Object, templates: dict[names.MemberRole, MemberTemplate]
) -> dict[names.MemberRole, PreviousRevision]:
    """Return the previous revision of each role whose pods the rollout changes. No request is sent.

    Expert-parallel groups have no previous revision. A new rank must be able to join the topology,
    so every new rank has the newest revision.

    Args:
        spec: the spec in the ControllerRevision of the previous revision.
        templates: templates of the newest revision.
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
                previous[role] = PreviousRevision(template, config_maps.build(resolved, role))
    except ValueError:  # a spec that another version of the operator recorded
        return {}
    return previous


def _pod_fields(spec: Object) -> Object:
    """Return a copy of `spec` with only the fields that affect pods."""
    fields = {field: value for field, value in spec.items() if field not in _NOT_OF_PODS}
    for group in names.CONFIGURED_ROLES:
        if isinstance(fields.get(group), dict):
            fields[group] = {
                field: value for field, value in fields[group].items() if field not in _SIZE_FIELDS
            }
    return fields


def _set_fields(node: Any, fields: tuple[str, ...]) -> Object:
    """Return the non-null `fields` of `node`; empty if `node` is not an object."""
    return (
        {field: node[field] for field in fields if node.get(field) is not None}
        if isinstance(node, dict)
        else {}
    )


async def _records(kube: Kube, service: Object) -> dict[str, Object]:
    """Return the service's ControllerRevisions by name, oldest first."""
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
