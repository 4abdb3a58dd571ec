"""Write the difference between the desired and the observed objects, except member pods.

Objects of other owners are not changed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from baton_kube.client import KubeError, Object
from baton_operator import names
from baton_operator.builders import service_key_secret
from baton_operator.builders.resolved_service import ResolvedService, controlled_by
from baton_operator.kube.objects import Kube
from baton_operator.observe.observation import Observation
from baton_operator.reconcile.desired import Desired
from baton_operator.reconcile_errors import (
    GatewayAPIMissing,
    NameConflict,
    Problem,
    ServiceKeyUnusable,
    problem_of,
)
from baton_protocol.service_key import ServiceKey


class RefusedObject(NamedTuple):
    """An object that could not be written or deleted."""

    kind: str
    problem: Problem


async def apply_objects(kube: Kube, desired: Desired, observed: Observation) -> list[RefusedObject]:
    """Create, update and delete the objects of a service except its member pods.

    Written objects are added to `observed`. Kinds outside `observed.kinds` are skipped. If an
    object is refused, the others are still written, with one exception. RoleBindings and
    Deployments are skipped if their ServiceAccount, Role or RoleBinding was refused. Pods must not
    get the rights of another owner's account or role.

    Returns:
        The refused objects. The kinds that members need come first, because the first problem of a
        reconcile decides `Ready`.

    Raises:
        StaleReadError: an object must be deleted, but it may have been read from a cache.
    """
    refused: list[RefusedObject] = []
    if desired.resolved.spec.gateway.http_route is not None and not desired.has_http_route:
        refused.append(RefusedObject("HTTPRoute", GatewayAPIMissing()))
    refused_accounts = set()
    for obj in desired.objects:
        key = obj["kind"], obj["metadata"]["name"]
        if obj["kind"] not in observed.kinds or _account_of(obj) in refused_accounts:
            continue
        try:
            observed.objects[key] = await apply_object(
                kube, desired.resolved, obj, observed.objects.get(key)
            )
        except (NameConflict, KubeError) as error:
            refused.append(RefusedObject(obj["kind"], problem_of(error)))
            if obj["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
                # The gateway's account, role and binding have the same name.
                refused_accounts.add(obj["metadata"]["name"])
    for kind, name in desired.absent:
        if present := observed.owned(kind, name):
            observed.freshness.require_consistent()
            try:
                await kube.delete(kind, observed.key.namespace, name, present["metadata"]["uid"])
            except KubeError as error:
                refused.append(RefusedObject(kind, problem_of(error)))
    return sorted(refused, key=lambda each: each.kind not in ("ConfigMap", "ServiceAccount"))


def missing_prerequisites(desired: Desired, observed: Observation) -> set[tuple[str, str]]:
    """Return (kind, name) of each missing object without which no member is created.

    The service's ConfigMaps and the ServiceAccount of its engines must exist. An object of another
    owner counts as missing, because another owner's ServiceAccount may have rights that members
    must not get.
    """
    account = names.engine_account_name(desired.resolved.name)
    needed = {("ServiceAccount", account), *(("ConfigMap", name) for name in desired.config_maps)}
    return {
        (kind, name)
        for kind, name in needed
        if kind in observed.kinds and not observed.owned(kind, name)
    }


def _account_of(obj: Object) -> str | None:
    """Return the name of the ServiceAccount that a Deployment or RoleBinding refers to.

    None: there is no such reference, or `obj` has another kind.
    """
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
            service_key_secret.build(resolved, service_key_secret.generate())
        )
    if not controlled_by(present, resolved.uid):
        raise NameConflict("Secret", name)
    try:
        return service_key_secret.read(present)
    except ValueError as error:
        raise ServiceKeyUnusable(name, error) from error


async def apply_object(
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


async def delete_unused_config_maps(
    kube: Kube, needed: Collection[str], observed: Observation
) -> None:
    """Delete the service's ConfigMaps that no pod mounts and that are not in `needed`.

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
            await kube.delete(
                "ConfigMap", observed.key.namespace, name, config_map["metadata"]["uid"]
            )
