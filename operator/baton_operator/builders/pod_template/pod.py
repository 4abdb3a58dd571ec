"""The pod template of engines and gateway: configuration, model, probes and security contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.field_types import Template
from baton_operator.builders import config_maps, model_volume, service_key_secret
from baton_operator.builders.pod_template import free_form_fields, overlay, restricted_profile
from baton_operator.builders.resolved_service import ResolvedService

#: User and group of all images (see docker/).
USER_ID = 65532
#: Seconds between the end of the component's drain and SIGKILL.
TERMINATION_MARGIN_S = 15


def pod_template(
    resolved: ResolvedService,
    role: names.ConfiguredRole,
    *,
    container: Object,
    pod: Object,
    template: Template | None,
    resources: dict[str, Any] | None,
    extra: Sequence[tuple[Object, Object]] = (),
) -> Object:
    """Return the pod template of `role`, with the user's overlay merged over it.

    Args:
        container: the parts of the container that differ between roles.
        pod: the parts of the pod's spec that differ between roles.
        template: the user's overlay, `spec.<role>.template`. None: there is none.
        resources: resources of the container, `spec.<role>.resources`. None: there are none.
        extra: (volume, mount) of each volume that only this role has.

    Raises:
        ValueError: the overlay cannot be merged, the overlay removes a required part, resources are
            invalid, or the operator's restrictions refuse a field. The message names the field.
    """
    free_form_fields.check_resources(resources, f"{role}.resources")
    restrictions = resolved.restrictions
    if restrictions is not None:
        restrictions.check_host_paths(resolved.spec)
    own = _own_template(resolved, role, container, pod, resources, extra)
    merged = _merge_overlay(own, resolved, role, template)
    if restrictions is not None:
        path = f"{role}.template"
        restricted_profile.check(own, merged, path, restrictions, _named_secrets(resolved))
        annotations = merged["metadata"].get("annotations", {}).keys()
        added = annotations - service_key_secret.pod_annotations(resolved).keys()
        restrictions.check_annotations(sorted(added), f"{path}.metadata.annotations")
        labels = merged["metadata"]["labels"].keys() - own["metadata"]["labels"].keys()
        restrictions.check_labels(sorted(labels), f"{path}.metadata.labels")
    return merged


def pod_security() -> Object:
    """Return the security context of every pod.

    With `fsGroupChangePolicy: OnRootMismatch`, the kubelet checks only the root folder of a volume
    at each pod start, instead of the owner of every file.
    """
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    """Return the security context of a container, for the restricted Pod Security Standard."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def identity_env(**more: str) -> list[Object]:
    """Return the environment variables $POD_IP, $POD_NAME, $POD_NAMESPACE and those in `more`."""
    fields = {
        "POD_IP": "status.podIP",
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
    }
    env: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in fields.items()
    ]
    return env + [{"name": name, "value": value} for name, value in more.items()]


def http_probe(path: str, *, period_s: int, failures: int, port: str = "http") -> Object:
    """Return an HTTP probe of `path` on the port that is named `port`.

    Args:
        failures: number of consecutive failures after which the probe has failed.
    """
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }


def _own_template(
    resolved: ResolvedService,
    role: names.ConfiguredRole,
    container: Object,
    pod: Object,
    resources: Object | None,
    extra: Sequence[tuple[Object, Object]],
) -> Object:
    """Return the pod template without the user's overlay.

    The arguments are those of `pod_template`.
    """
    source = model_volume.source(resolved.spec.model, role, resolved.namespace)
    config_map = config_maps.build(resolved, role)["metadata"]["name"]
    mounted = [
        (
            {"name": "config", "configMap": {"name": config_map}},
            {"name": "config", "mountPath": config_maps.MOUNT_PATH, "readOnly": True},
        ),
        (service_key_secret.volume(resolved), service_key_secret.mount()),
        *extra,
        ({"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}),
        # The model's mount is last, because server-side apply appends a mount with a new path. In
        # another position, an edit of model.uri would change the order of the mounts, and undoing
        # the edit would not restore it. The Deployment would then not find the earlier ReplicaSet.
        (source.volume, source.mount),
    ]
    container = {
        "image": resolved.spec.image,
        "volumeMounts": [mount for _, mount in mounted],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(),
        **container,
    }
    if resources:
        container["resources"] = resources
    drain_timeout_s = resolved.spec.drain_timeout_seconds
    spec: Object = {
        "containers": [container],
        "volumes": [volume for volume, _ in mounted],
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": drain_timeout_s + TERMINATION_MARGIN_S,
        **pod,
    }
    if fetcher := model_volume.fetcher(
        resolved.spec.model,
        role,
        resolved.namespace,
        image=resolved.spec.image,
        env=identity_env(),
        security=container_security(),
        resources=resources,
    ):
        spec["initContainers"] = [fetcher]
    return {"metadata": {"labels": names.labels(resolved.name, role)}, "spec": spec}


def _merge_overlay(
    own: Object, resolved: ResolvedService, role: names.ConfiguredRole, template: Template | None
) -> Object:
    """Return the pod template `own` with the changes of the user's overlay `template`.

    An overlay cannot change the labels that selectors use, the id of the service key or the
    variables of `identity_env`.
    """
    path = f"{role}.template"
    free_form_fields.check_depth(template, path)
    merged = overlay.merge(own, template or {}, path)
    metadata, spec = (_object(merged, field, path) for field in ("metadata", "spec"))
    labels = free_form_fields.strings(metadata.get("labels"), f"{path}.metadata.labels")
    kept: Object = {"labels": labels | names.labels(resolved.name, role)}
    if "annotations" in metadata:
        kept["annotations"] = free_form_fields.strings(
            metadata["annotations"], f"{path}.metadata.annotations"
        )
    if key := service_key_secret.pod_annotations(resolved):
        kept["annotations"] = kept.get("annotations", {}) | key
    name = own["spec"]["containers"][0]["name"]
    container = _container(spec, name, f"{path}.spec.containers")
    _keep_identity(container)
    free_form_fields.check_resources(
        container.get("resources"), f"{path}.spec.containers[{name}].resources"
    )
    return {"metadata": kept, "spec": spec}


def _named_secrets(resolved: ResolvedService) -> set[str]:
    """Return the names of the Secret with the service key and of the Secrets in the spec."""
    model, gateway = resolved.spec.model, resolved.spec.gateway
    in_gateway = (gateway.api_keys, gateway.tls, gateway.ingress and gateway.ingress.tls)
    found = [model.credentials_secret, *(each.secret_name for each in in_gateway if each)]
    return {names.service_key_name(resolved.name), *filter(None, found)}


def _object(parent: Object, field: str, path: str) -> Object:
    found = parent.get(field)
    if not isinstance(found, dict):
        raise free_form_fields.must_be("an object", f"{path}.{field}", found)
    return found


def _container(spec: Object, name: str, path: str) -> Object:
    """Return the container `name` of the merged pod spec.

    Raises:
        ValueError: the overlay has removed the list of containers.
    """
    if "containers" not in spec:
        raise free_form_fields.must_be("a list", path, None)
    (found,) = (container for container in spec["containers"] if container["name"] == name)
    return found


def _keep_identity(container: Object) -> None:
    """Restore the variables of `identity_env`, which an overlay may have changed.

    With another $POD_IP, for example, a component would listen on a wrong address.
    """
    own = {item["name"]: item for item in identity_env()}
    others = [item for item in container.get("env", []) if item["name"] not in own]
    container["env"] = [*own.values(), *others]
