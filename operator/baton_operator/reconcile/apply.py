"""Write the difference between the desired and the observed state.

Objects of other owners are not changed.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from baton_kube.client import KubeError, Object
from baton_operator import names
from baton_operator.builders import service_key_secret
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService, controlled_by
from baton_operator.kube.events import Events
from baton_operator.kube.objects import Kube
from baton_operator.observe.observation import Observation
from baton_operator.plan.plan_group import Delete, GroupPlan
from baton_operator.plan.refused_pods import PodRefusal, refusal_of
from baton_operator.reconcile.desired import Desired
from baton_operator.reconcile_errors import (
    GatewayAPIMissing,
    NameConflict,
    Problem,
    ServiceKeyUnusable,
    problem_of,
)
from baton_operator.revision_history import PreviousRevision
from baton_protocol.service_key import ServiceKey


async def apply_objects(
    kube: Kube, resolved: ResolvedService, desired: Desired, observed: Observation
) -> list[tuple[str, Problem]]:
    """Create, update and delete the objects of a service except its member pods.

    Written objects are added to `observed`. Kinds outside `observed.kinds` are skipped. If the
    API server refuses one object, the others are still written, except those that would use it as
    an account or as its rights: an object of another owner may have this name.

    Returns:
        (kind, problem) for each refused object.

    Raises:
        StaleReadError: an object must be deleted, but it may have been read from a cache.
    """
    refused: list[tuple[str, Problem]] = []
    if resolved.spec.gateway.http_route is not None and not kube.http_routes:
        refused.append(("HTTPRoute", GatewayAPIMissing()))
    refused_accounts = set()
    for obj in desired.objects:
        key = obj["kind"], obj["metadata"]["name"]
        if obj["kind"] not in observed.kinds or _account_of(obj) in refused_accounts:
            continue
        try:
            observed.objects[key] = await _apply(kube, resolved, obj, observed.objects.get(key))
        except (NameConflict, KubeError) as error:
            refused.append((obj["kind"], problem_of(error)))
            if obj["kind"] in ("ServiceAccount", "Role", "RoleBinding"):  # they share their name
                refused_accounts.add(obj["metadata"]["name"])
    for kind, name in desired.absent:
        if present := observed.owned(kind, name):
            observed.freshness.require_consistent()
            try:
                await kube.delete(kind, resolved.namespace, name, present["metadata"]["uid"])
            except KubeError as error:
                refused.append((kind, problem_of(error)))
    return refused


def _account_of(obj: Object) -> str | None:
    """Return the account that a Deployment's pods use, or a RoleBinding binds; None: no account."""
    if obj["kind"] == "RoleBinding":
        return str(obj["metadata"]["name"])
    if obj["kind"] != "Deployment":
        return None
    account: str | None = obj["spec"]["template"]["spec"].get("serviceAccountName")
    return account


async def ensure_service_key(
    kube: Kube, resolved: ResolvedService, present: Object | None
) -> ServiceKey:
    """Return the service's key. If `present` is None, create the Secret with a new key.

    Args:
        present: the existing Secret. It is not changed.

    Raises:
        NameConflict: the Secret has another owner.
        ServiceKeyUnusable: the Secret contains no valid key.
        KubeError: the API server refused a request.
    """
    name = names.service_key_name(resolved.name)
    if present is None:
        present = await kube.create(
            service_key_secret.secret(resolved, service_key_secret.generate())
        )
    if not controlled_by(present, resolved.uid):
        raise NameConflict("Secret", name)
    try:
        return service_key_secret.read(present)
    except ValueError as error:
        raise ServiceKeyUnusable(name, error) from error


async def _apply(
    kube: Kube, resolved: ResolvedService, obj: Object, present: Object | None
) -> Object:
    """Write `obj`, unless the stored object already matches. Return the stored object.

    Args:
        present: the stored object as listed; None if the list did not contain it.

    Raises:
        NameConflict: the object has another owner.
        KubeError: the API server refused a request.
    """
    name = obj["metadata"]["name"]
    if present is None:  # the list contains only objects with the service's label
        present = await kube.read(obj["kind"], resolved.namespace, name)
    if present is not None and not controlled_by(present, resolved.uid):
        raise NameConflict(obj["kind"], name)
    digest = names.content_hash(obj)
    annotations = obj["metadata"].get("annotations", {}) | {names.ANNOTATION_APPLIED: digest}
    stamped = obj | {"metadata": obj["metadata"] | {"annotations": annotations}}
    if present is not None and contains(present, stamped):
        return present
    return await kube.apply(stamped)


def contains(present: Any, desired: Any) -> bool:
    """Return whether `present` has every field of `desired` with the same value.

    Other fields of `present` are ignored, because the server or other managers set them.
    """
    if isinstance(desired, dict):
        return isinstance(present, dict) and all(
            key in present and contains(present[key], desired[key]) for key in desired
        )
    if isinstance(desired, list):
        return (
            isinstance(present, list)
            and len(present) == len(desired)
            and all(map(contains, present, desired))
        )
    return bool(present == desired)


async def apply_members(
    kube: Kube,
    events: Events,
    resolved: ResolvedService,
    template: MemberTemplate,
    previous: PreviousRevision | None,
    plan: GroupPlan,
    observed: Observation,
    now: datetime,
) -> PodRefusal | None:
    """Take the planned step of one group: mark members as draining, delete and create members.

    If marking a pod fails, the step continues, and the error is raised at the end. After the first
    pod that the API server refuses, no further pod is created.

    Returns:
        Why the API server refused a pod; None if no pod was refused.

    Raises:
        NameConflict: an object of another owner has the name of a pod or ConfigMap to create.
        KubeError: the API server refused a request.
    """
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in observed.pods}
    mark_errors = await _mark_draining(kube, events, plan.drain, uids, observed.service, now)
    await _delete_pods(kube, events, plan.delete, uids, observed.service)
    pods = [template.pod(ordinal) for ordinal in plan.create]
    if plan.restore:
        assert previous is not None, "a plan restores only from a previous revision"
        await _apply(kube, resolved, previous.config_map, None)
        pods += [previous.template.pod(ordinal) for ordinal in plan.restore]
    refusal, create_errors = await _create_pods(kube, events, resolved, pods, observed.service)
    if errors := [*mark_errors, *create_errors]:
        raise errors[0]
    return refusal


async def _mark_draining(
    kube: Kube,
    events: Events,
    pods: list[str],
    uids: dict[str, str],
    service: Object,
    now: datetime,
) -> list[KubeError]:
    """Annotate the pods as draining since `now`. Return the errors of pods that were not marked."""
    marks = {
        names.ANNOTATION_DRAINING: "true",
        names.ANNOTATION_DRAIN_STARTED: now.isoformat(timespec="seconds"),
    }
    errors: list[KubeError] = []
    for name in pods:
        # The uid is a precondition, so that a new pod with the same name is not marked.
        patch = {"metadata": {"uid": uids[name], "annotations": marks}}
        try:
            await kube.merge("Pod", service["metadata"]["namespace"], name, patch)
        except KubeError as error:
            # 404, 409: the pod was deleted or replaced after it was observed.
            if error.status not in (404, 409):
                errors.append(error)
        else:
            message = f"pod {name} gets no new requests and finishes running ones"
            await events.emit(service, "Draining", message)
    return errors


async def _delete_pods(
    kube: Kube, events: Events, deletions: list[Delete], uids: dict[str, str], service: Object
) -> None:
    """Delete the pods in `deletions` that still exist."""
    namespace = service["metadata"]["namespace"]
    for deletion in deletions:
        if await kube.delete("Pod", namespace, deletion.name, uids[deletion.name]):
            await events.emit(service, "Deleted", f"pod {deletion.name}: {deletion.why}")


async def _create_pods(
    kube: Kube, events: Events, resolved: ResolvedService, pods: list[Object], service: Object
) -> tuple[PodRefusal | None, list[NameConflict | KubeError]]:
    """Create the pods in order, and stop at the first one that the API server refuses.

    Returns:
        (refusal, errors). The refusal is why the API server refused a pod, or None. The errors are
            those of other pods that could not be created.
    """
    errors: list[NameConflict | KubeError] = []
    for pod in pods:
        name = pod["metadata"]["name"]
        try:
            await kube.create(pod)
        except KubeError as error:
            if error.reason == "AlreadyExists":
                try:
                    await _restore_labels(kube, resolved, pod)
                except (NameConflict, KubeError) as conflict:
                    errors.append(conflict)
                continue
            await events.emit(service, "CreateFailed", f"pod {name}: {error}", warning=True)
            if refusal := refusal_of(error, name):
                return refusal, errors
            errors.append(error)
        else:
            await events.emit(service, "Created", f"pod {name}")
    return None, errors


async def _restore_labels(kube: Kube, resolved: ResolvedService, pod: Object) -> None:
    """Restore the operator's labels on the existing pod that has the same name as `pod`.

    Such a pod was not observed, because a client removed its labels or the response to its creation
    was lost.

    Raises:
        NameConflict: the pod has another owner.
        KubeError: the API server refused a request.
    """
    name = pod["metadata"]["name"]
    present = await kube.read("Pod", resolved.namespace, name)
    if present is None:
        return
    if not controlled_by(present, resolved.uid):
        raise NameConflict("Pod", name)
    # The revision label is not changed, because the existing pod may have another revision.
    ours = {
        label: value
        for label, value in pod["metadata"]["labels"].items()
        if label != names.LABEL_REVISION
    }
    if not ours.items() <= (present["metadata"].get("labels") or {}).items():
        await kube.merge(
            "Pod",
            resolved.namespace,
            name,
            {"metadata": {"uid": present["metadata"]["uid"], "labels": ours}},
        )


async def collect_config_maps(
    kube: Kube, resolved: ResolvedService, needed: Collection[str], observed: Observation
) -> None:
    """Delete the service's ConfigMaps that no pod mounts.

    Nothing is deleted if this reconcile did not list the ConfigMaps.

    Args:
        needed: names of ConfigMaps to keep even if no pod mounts them.

    Raises:
        StaleReadError: a ConfigMap must be deleted, but it may have been read from a cache.
        KubeError: the API server refused a request.
    """
    used = {*needed, *observed.mounted_config_maps}
    for kind, name in list(observed.objects):
        if kind == "ConfigMap" and name not in used and (config_map := observed.owned(kind, name)):
            observed.freshness.require_consistent()
            await kube.delete("ConfigMap", resolved.namespace, name, config_map["metadata"]["uid"])
