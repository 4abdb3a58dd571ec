"""The subresources `scale` and `binding`."""

from __future__ import annotations

from typing import Any

from pocketkube.apiserver import errors
from pocketkube.apiserver.objects.object_registry import Registry, WriteOptions
from pocketkube.apiserver.resources import Object, RequestInfo, Resource, lookup
from pocketkube.apiserver.schema.catalog import Catalog
from pocketkube.timestamps import timestamp

_BUILTIN_SCALE = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}


class Scale:
    """Reads and writes the scale subresource of built-in and custom resources."""

    def __init__(self, registry: Registry, catalog: Catalog) -> None:
        self._registry = registry
        self._catalog = catalog

    def get(self, info: RequestInfo) -> Object:
        return self._view(info.resource, self._registry.stored(info))

    def _paths(self, resource: Resource) -> Object:
        custom = self._catalog.custom(resource)
        return (custom.scale or {}) if custom else _BUILTIN_SCALE

    def _view(self, resource: Resource, obj: Object) -> Object:
        metadata, paths = obj["metadata"], self._paths(resource)
        selector = lookup(obj, paths["labelSelectorPath"]) if "labelSelectorPath" in paths else None
        if not resource.custom:
            labels = (obj["spec"].get("selector") or {}).get("matchLabels") or {}
            selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        status: Object = {"replicas": lookup(obj, paths["statusReplicasPath"]) or 0}
        if selector:
            status["selector"] = selector
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {key: metadata[key] for key in kept if key in metadata},
            "spec": {"replicas": lookup(obj, paths["specReplicasPath"]) or 0},
            "status": status,
        }

    def update(self, info: RequestInfo, scale: Object, options: WriteOptions) -> Object:
        replicas = (scale.get("spec") or {}).get("replicas", 0)
        if type(replicas) is not int:
            raise errors.bad_request(f"spec.replicas: expected an integer, got {replicas!r}")
        if replicas < 0:
            detail = "must be greater than or equal to 0"
            raise errors.invalid(
                info.resource, info.name, [errors.invalid_value("spec.replicas", replicas, detail)]
            )
        old = self._registry.stored(info)
        *parents, last = self._paths(info.resource)["specReplicasPath"].strip(".").split(".")

        def edit(obj: Object) -> None:
            given = (scale.get("metadata") or {}).get("resourceVersion")
            if given:
                obj["metadata"]["resourceVersion"] = given
            target = obj
            for parent in parents:
                target = target.setdefault(parent, {})
            target[last] = replicas

        new = self._registry.change(info.resource, old, edit, options, info.subresource)
        return self._view(info.resource, new)

    def patch(
        self, info: RequestInfo, content_type: str, body: Any, options: WriteOptions
    ) -> Object:
        if content_type == "application/apply-patch+yaml":
            raise errors.unsupported_media_type(
                "apply the object itself, or patch its scale with a merge patch"
            )
        if content_type == "application/strategic-merge-patch+json":
            # Both patch types have the same effect on an object without lists.
            content_type = "application/merge-patch+json"
        scale = self._registry.patched(info.resource, self.get(info), content_type, body)
        return self.update(info, scale, options)


def bind(registry: Registry, info: RequestInfo, binding: Object, options: WriteOptions) -> Object:
    """Bind a pod to the node that `binding` names. Return a Status of success."""
    pods, name = info.resource, info.name
    target = (binding.get("target") or {}).get("name")
    if not target:
        raise errors.invalid(pods, name, [errors.required("target.name")])
    pod = registry.stored(info)
    if assigned := pod["spec"].get("nodeName"):
        raise errors.conflict(pods, name, f"pod {name} is already assigned to node {assigned!r}")
    if pod["metadata"].get("deletionTimestamp"):
        raise errors.conflict(
            pods, name, f"pod {name} is being deleted, cannot be assigned to a host"
        )
    scheduled = {
        "type": "PodScheduled",
        "status": "True",
        "lastProbeTime": None,
        "lastTransitionTime": timestamp(),
    }

    def place(obj: Object) -> None:
        obj["spec"]["nodeName"] = target

    def report(obj: Object) -> None:
        status = obj.setdefault("status", {})
        others = [
            condition
            for condition in status.get("conditions") or ()
            if condition["type"] != "PodScheduled"
        ]
        status["conditions"] = [*others, scheduled]

    placed = registry.change(pods, pod, place, options, validate=False)
    registry.change(pods, placed, report, options, "status", validate=False)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
