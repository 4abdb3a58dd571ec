"""Writes the difference between desired and observed, and never to what another owner made."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from baton_engine.protocol.service_key import ServiceKey
from baton_operator import names
from baton_operator.builders import service_key
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Owner
from baton_operator.desired import Desired
from baton_operator.events import Events
from baton_operator.former import Former
from baton_operator.kube import Kube, KubeError
from baton_operator.observe import Observation, controlled_by
from baton_operator.plan import GroupPlan
from baton_operator.refusals import Refusal, refusal_of

Object = dict[str, Any]


class NameConflict(Exception):  # noqa: N818 - the reason of the condition
    """An object with a name we need belongs to someone else."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{kind} {name} exists and is not controlled by this LLMService; delete it, or rename the service"
        )


class GatewayAPIMissing(Exception):  # noqa: N818 - the reason of the condition
    """A route was asked for, but the API server has none."""

    def __init__(self) -> None:
        super().__init__(
            "spec.gateway.httpRoute: the cluster has no gateway.networking.k8s.io/v1; install the Gateway API, or use "
            "spec.gateway.ingress"
        )


async def apply_objects(
    kube: Kube, owner: Owner, desired: Desired
) -> tuple[dict[tuple[str, str], Object], list[NameConflict | GatewayAPIMissing | KubeError]]:
    """Creates, updates and deletes the objects beside the members.

    Returns:
        What exists now by (kind, name), and what was refused: one that is does not keep the others from being right.
    """
    existing: dict[tuple[str, str], Object] = {}
    errors: list[NameConflict | GatewayAPIMissing | KubeError] = []
    if owner.spec.gateway.http_route is not None and not kube.http_routes:
        errors.append(GatewayAPIMissing())
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


class ServiceKeyUnusable(Exception):  # noqa: N818 - the reason of the condition
    """The Secret with the service's key holds none."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"Secret {name}: {why}; delete it, and another key is drawn")


async def ensure_service_key(kube: Kube, owner: Owner, present: Object | None) -> ServiceKey:
    """The service's key; draws one if there is no Secret, and never changes one.

    Args:
        present: the Secret as observed.

    Raises:
        NameConflict, ServiceKeyUnusable, KubeError
    """
    name = names.service_key_name(owner.name)
    if present is None:
        # What the engines shared before this key was for all: here, for it is looked for only once.
        former = await kube.get("Secret", owner.namespace, names.former_secret_name(owner.name))
        if former is not None and controlled_by(former, owner.uid):
            await kube.delete("Secret", owner.namespace, former["metadata"]["name"], former["metadata"]["uid"])
        present = await kube.create(service_key.secret(owner, service_key.draw()))
    if not controlled_by(present, owner.uid):
        raise NameConflict("Secret", name)
    try:
        return service_key.read(present)
    except ValueError as error:
        raise ServiceKeyUnusable(name, error) from error


async def _apply(kube: Kube, owner: Owner, obj: Object) -> Object:
    name = obj["metadata"]["name"]
    present = await kube.get(obj["kind"], owner.namespace, name)
    if present is None:  # a cache has only what is labelled as ours
        present = await kube.read(obj["kind"], owner.namespace, name)
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
    former: Former | None,
    plan: GroupPlan,
    observed: Observation,
    now: datetime,
) -> Refusal | None:
    """One step of one group. Every member is tried, then the first error is raised; but after a pod that the API server does
    not take no further one is created.

    Returns:
        Why a pod was refused.

    Raises:
        NameConflict, KubeError
    """
    refusal: Refusal | None = None
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
    pods = [template.pod(ordinal) for ordinal in plan.create]
    if plan.restore:
        assert former is not None, "the plan knows of it"
        await _apply(kube, owner, former.config_map)
        pods += [former.template.pod(ordinal) for ordinal in plan.restore]
    for pod in pods:
        try:
            await kube.create(pod)
        except KubeError as error:
            if error.reason == "AlreadyExists":
                try:
                    await _adopt_taken(kube, owner, pod)
                except (NameConflict, KubeError) as conflict:
                    errors.append(conflict)
                continue
            await events.warning(observed.service, "CreateFailed", f"pod {pod['metadata']['name']}: {error}")
            refusal = refusal_of(error, pod["metadata"]["name"])
            if refusal is not None:
                break
            errors.append(error)
            continue
        await events.normal(observed.service, "Created", f"pod {pod['metadata']['name']}")
    if errors:
        raise errors[0]
    return refusal


async def _adopt_taken(kube: Kube, owner: Owner, pod: Object) -> None:
    """What has the name of the pod we wanted to create may be ours: the answer to its creation was lost, or its labels were.

    Raises NameConflict, KubeError.
    """
    name = pod["metadata"]["name"]
    present = await kube.read("Pod", owner.namespace, name)
    if present is None:
        return
    if not controlled_by(present, owner.uid):
        raise NameConflict("Pod", name)
    # Its revision is not known from what is wanted now.
    ours = {label: value for label, value in pod["metadata"]["labels"].items() if label != names.LABEL_REVISION}
    if not ours.items() <= (present["metadata"].get("labels") or {}).items():
        await kube.merge(
            "Pod", owner.namespace, name, {"metadata": {"uid": present["metadata"]["uid"], "labels": ours}}
        )


async def collect_config_maps(kube: Kube, owner: Owner, desired: Desired, observed: Observation) -> None:
    """Deletes ConfigMaps of earlier revisions that no pod mounts any more. Raises KubeError."""
    used = {obj["metadata"]["name"] for obj in desired.objects if obj["kind"] == "ConfigMap"}
    for pod in [*observed.pods, *observed.strays]:
        used |= {volume["configMap"]["name"] for volume in pod["spec"].get("volumes") or [] if "configMap" in volume}
    for config_map in observed.config_maps:
        metadata = config_map["metadata"]
        if metadata["name"] not in used:
            await kube.delete("ConfigMap", owner.namespace, metadata["name"], metadata["uid"])
