"""Set the defaults of built-in kinds on every write, and convert Events between API versions."""

from __future__ import annotations

import base64
import copy

from pocketkube.apiserver.resources import Object
from pocketkube.apiserver.schema.apiextensions import default_crd

#: Built-in kinds with metadata.generation, which counts changes of the desired state. Custom
#: resources always have it.
WITH_GENERATION = frozenset(
    {
        "Deployment",
        "ReplicaSet",
        "Ingress",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "CustomResourceDefinition",
    }
)

#: Built-in kinds whose updates must have metadata.resourceVersion. Updates of custom resources
#: must always have it.
VERSIONED = frozenset({"CustomResourceDefinition", "Lease", "PodDisruptionBudget"})


def set_defaults(kind: str, obj: Object) -> None:
    """Set the defaults of a built-in kind in `obj`, in place."""
    if kind in _DEFAULTS:
        _DEFAULTS[kind](obj)


def _fill(obj: Object, defaults: Object) -> None:
    """Add to `obj` each field of `defaults` that is missing in `obj`."""
    obj.update({**defaults, **obj})


def set_pod_spec_defaults(spec: Object) -> None:
    defaults = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "securityContext": {},
    }
    _fill(spec, defaults)
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        _container_defaults(container)
    for volume in spec.get("volumes") or ():
        if len(volume) == 1:
            volume["emptyDir"] = {}
        for source in ("secret", "configMap", "projected", "downwardAPI"):
            if source in volume:
                volume[source].setdefault("defaultMode", 0o644)


def _container_defaults(container: Object) -> None:
    image = container.get("image", "")
    _, _, tag = image.rpartition("/")[2].partition(":")
    is_latest = tag in ("", "latest") and "@" not in image
    defaults = {
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "Always" if is_latest else "IfNotPresent",
    }
    _fill(container, defaults)
    for port in container.get("ports") or ():
        port.setdefault("protocol", "TCP")
    for variable in container.get("env") or ():
        if reference := (variable.get("valueFrom") or {}).get("fieldRef"):
            reference.setdefault("apiVersion", "v1")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if (probe := container.get(name)) is not None:
            _fill(probe, _PROBE)
            if (http := probe.get("httpGet")) is not None:
                _fill(http, {"path": "/", "scheme": "HTTP"})


_PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}


def _pod(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    set_pod_spec_defaults(spec)
    # The admission plugins of Kubernetes set the account and the priority. The kubelet adds the
    # volume with the account's token.
    account = spec.get("serviceAccountName", "default")
    defaults = {
        "enableServiceLinks": True,
        "serviceAccountName": account,
        "serviceAccount": account,
        "priority": 0,
        "preemptionPolicy": "PreemptLowerPriority",
    }
    _fill(spec, defaults)


def qos_class(spec: Object) -> str:
    """Return the QoS class for the spec of a pod: BestEffort, Burstable or Guaranteed."""
    resources = [container.get("resources") or {} for container in spec.get("containers") or ()]
    if not any(r.get("limits") or r.get("requests") for r in resources):
        return "BestEffort"

    def guaranteed(r: Object) -> bool:
        limits, requests = r.get("limits") or {}, r.get("requests") or r.get("limits") or {}
        return all(
            name in limits and limits[name] == requests.get(name, limits[name])
            for name in ("cpu", "memory")
        )

    return "Guaranteed" if all(map(guaranteed, resources)) else "Burstable"


def _workload(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    spec.setdefault("replicas", 1)
    if template := spec.get("template"):
        template.setdefault("metadata", {})
        set_pod_spec_defaults(template.setdefault("spec", {}))


def _deployment(obj: Object) -> None:
    _workload(obj)
    spec = obj["spec"]
    strategy = spec.setdefault("strategy", {})
    if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
        rolling = strategy.setdefault("rollingUpdate", {})
        _fill(rolling, {"maxUnavailable": "25%", "maxSurge": "25%"})
    _fill(spec, {"revisionHistoryLimit": 10, "progressDeadlineSeconds": 600})


def _service(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    defaults = {
        "type": "ClusterIP",
        "sessionAffinity": "None",
        "internalTrafficPolicy": "Cluster",
        "ipFamilies": ["IPv4"],
        "ipFamilyPolicy": "SingleStack",
        **({"clusterIPs": [spec["clusterIP"]]} if "clusterIP" in spec else {}),
    }
    _fill(spec, defaults)
    for port in spec.get("ports") or ():
        _fill(port, {"protocol": "TCP"} | ({"targetPort": port["port"]} if "port" in port else {}))


def _secret(obj: Object) -> None:
    obj.setdefault("type", "Opaque")
    for key, text in (obj.pop("stringData", None) or {}).items():
        obj.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()


def _namespace(obj: Object) -> None:
    obj["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = obj["metadata"][
        "name"
    ]


def _network_policy(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    if not spec.get("policyTypes"):
        spec["policyTypes"] = ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]
    for rule in (*(spec.get("ingress") or ()), *(spec.get("egress") or ())):
        for port in rule.get("ports") or ():
            port.setdefault("protocol", "TCP")


_DEFAULTS = {
    "Pod": _pod,
    "Deployment": _deployment,
    "ReplicaSet": _workload,
    "Service": _service,
    "Secret": _secret,
    "Namespace": _namespace,
    "NetworkPolicy": _network_policy,
    "CustomResourceDefinition": default_crd,
}

#: core/v1 field -> events.k8s.io/v1 field of the same stored event.
_EVENT_FIELDS = {
    "involvedObject": "regarding",
    "message": "note",
    "reportingComponent": "reportingController",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
}


def event_to_core(event: Object) -> Object:
    """Convert an events.k8s.io/v1 Event to the stored core/v1 Event."""
    back = {new: old for old, new in _EVENT_FIELDS.items()}
    converted = {back.get(name, name): copy.copy(value) for name, value in event.items()}
    return {**converted, "apiVersion": "v1", "kind": "Event"}


def event_from_core(event: Object) -> Object:
    """Convert the stored core/v1 Event to an events.k8s.io/v1 Event."""
    converted = {_EVENT_FIELDS.get(name, name): copy.copy(value) for name, value in event.items()}
    return {**converted, "apiVersion": "events.k8s.io/v1", "kind": "Event"}
