"""Writes the difference between desired and observed, and never to what another owner made."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Any

from baton_operator import names
from baton_operator.builders import kv_token
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Owner
from baton_operator.desired import Desired
from baton_operator.events import Events
from baton_operator.kube import Kube, KubeError
from baton_operator.observe import Observation, controlled_by
from baton_operator.plan import GroupPlan

Object = dict[str, Any]


class NameConflict(Exception):  # noqa: N818 - the reason of the condition
    """An object with a name we need belongs to someone else."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{kind} {name} exists and is not controlled by this LLMService; delete it, or rename the service"
        )


async def apply_objects(
    kube: Kube, owner: Owner, desired: Desired
) -> tuple[dict[tuple[str, str], Object], list[NameConflict | KubeError]]:
    """Creates, updates and deletes the objects beside the members.

    Returns:
        What exists now by (kind, name), and what was refused: one that is does not keep the others from being right.
    """
    existing: dict[tuple[str, str], Object] = {}
    errors: list[NameConflict | KubeError] = []
    for obj in desired.objects:
        key = (obj["kind"], obj["metadata"]["name"])
        try:
            existing[key] = await _apply(kube, owner, obj)
        except (NameConflict, KubeError) as error:
            errors.append(error)
    for kind, name in desired.absent:
        try:
            present = await kube.get(kind, owner.namespace, name)
            if present and controlled_by(present, owner.uid):
                await kube.delete(kind, owner.namespace, name, present["metadata"]["uid"])
        except KubeError as error:
            errors.append(error)
    return existing, errors


async def ensure_kv_token(kube: Kube, owner: Owner) -> None:
    """Makes the engines' shared secret if there is none; never changes one. Raises NameConflict, KubeError."""
    name = names.kv_token_name(owner.name)
    present = await kube.get("Secret", owner.namespace, name)
    if present is None:
        try:
            present = await kube.create(kv_token.secret(owner, secrets.token_hex(32).encode()))
        except KubeError as error:
            if error.reason != "AlreadyExists":
                raise
            present = await kube.get("Secret", owner.namespace, name)
    if present is not None and not controlled_by(present, owner.uid):
        raise NameConflict("Secret", name)


async def _apply(kube: Kube, owner: Owner, obj: Object) -> Object:
    name = obj["metadata"]["name"]
    present = await kube.get(obj["kind"], owner.namespace, name)
    if present is not None and not controlled_by(present, owner.uid):
        raise NameConflict(obj["kind"], name)
    digest = names.content_hash(obj)
    annotations = obj["metadata"].get("annotations", {}) | {names.ANNOTATION_APPLIED: digest}
    stamped = obj | {"metadata": obj["metadata"] | {"annotations": annotations}}
    if present is not None and contains(present, stamped):
        return present
    return await kube.apply(stamped)


def contains(present: Any, wanted: Any) -> bool:
    """Whether `present` has everything `wanted` says; what it has besides is the server's or another manager's."""
    if isinstance(wanted, dict):
        return isinstance(present, dict) and all(
            key in present and contains(present[key], wanted[key]) for key in wanted
        )
    if isinstance(wanted, list):
        return isinstance(present, list) and len(present) == len(wanted) and all(map(contains, present, wanted))
    return bool(present == wanted)


async def apply_members(
    kube: Kube,
    events: Events,
    owner: Owner,
    template: MemberTemplate,
    plan: GroupPlan,
    observed: Observation,
    now: datetime,
) -> None:
    """One step of one group. Every member is tried, then the first error is raised. Raises NameConflict, KubeError."""
    errors: list[NameConflict | KubeError] = []
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in observed.pods}
    for name in plan.drain:
        marks = {names.ANNOTATION_DRAINING: "true", names.ANNOTATION_DRAIN_STARTED: now.isoformat(timespec="seconds")}
        # The uid makes it a precondition: a successor of the same name is not marked.
        try:
            await kube.merge("Pod", owner.namespace, name, {"metadata": {"uid": uids[name], "annotations": marks}})
        except KubeError as error:
            if error.status not in (404, 409):  # gone since it was observed: so much the better
                errors.append(error)
            continue
        await events.normal(observed.service, "Draining", f"pod {name} takes no new requests and finishes what it runs")
    for deletion in plan.delete:
        if await kube.delete("Pod", owner.namespace, deletion.name, uids[deletion.name]):
            await events.normal(observed.service, "Deleted", f"pod {deletion.name}: {deletion.why}")
    for ordinal in plan.create:
        pod = template.pod(ordinal)
        try:
            await kube.create(pod)
        except KubeError as error:
            if error.reason == "AlreadyExists":
                errors.append(NameConflict("Pod", pod["metadata"]["name"]))
                continue
            await events.warning(observed.service, "CreateFailed", f"pod {pod['metadata']['name']}: {error}")
            errors.append(error)
            continue
        await events.normal(observed.service, "Created", f"pod {pod['metadata']['name']}")
    if errors:
        raise errors[0]


async def collect_config_maps(kube: Kube, owner: Owner, desired: Desired, observed: Observation) -> None:
    """Deletes ConfigMaps of earlier revisions that no pod mounts any more. Raises KubeError."""
    used = {obj["metadata"]["name"] for obj in desired.objects if obj["kind"] == "ConfigMap"}
    for pod in observed.pods:
        used |= {volume["configMap"]["name"] for volume in pod["spec"].get("volumes") or [] if "configMap" in volume}
    for config_map in observed.config_maps:
        metadata = config_map["metadata"]
        if metadata["name"] not in used:
            await kube.delete("ConfigMap", owner.namespace, metadata["name"], metadata["uid"])
