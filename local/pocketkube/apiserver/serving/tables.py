"""Build the tables that `kubectl get` prints, with the columns of each kind."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from typing import Any

from pocketkube.apiserver.resources import Object, Resource

#: (name, type, priority, function from an object to its cell).
Column = tuple[str, str, int, Callable[[Object], Any]]

_FILTER = re.compile(r"""^\?\(@\.([\w./-]+)\s*==\s*["'](.*)["']\)$""")
_STEP = re.compile(r"""\.((?:\\.|[^.\[\]\\])+)|\[([^\]]+)\]""")


def json_path(obj: Any, expression: str) -> Any:
    """Evaluate the JSON path of a printer column. Return None if no value is found.

    If several values are found, they are joined with commas. The supported syntax is `.a.b`, `[0]`,
    `['key']`, `[*]` and `[?(@.type=="Ready")]`.
    """
    found = [obj]
    for match in _STEP.finditer(expression.strip("{}")):
        found = [below for value in found for below in _step(value, match[1], match[2])]
    if not found:
        return None
    return found[0] if len(found) == 1 else ",".join(str(value) for value in found)


def _step(value: Any, name: str | None, index: str | None) -> list[Any]:
    if name is not None:
        name = name.replace("\\.", ".")
        return [value[name]] if isinstance(value, dict) and name in value else []
    assert index is not None, "the pattern matches a name or an index"
    if index == "*":
        return list(value.values()) if isinstance(value, dict) else list(value or ())
    if condition := _FILTER.match(index):
        path, wanted = f".{condition[1]}", condition[2]
        return (
            [item for item in value if str(json_path(item, path)) == wanted]
            if isinstance(value, list)
            else []
        )
    if isinstance(value, list) and re.fullmatch(r"-?\d+", index):
        return [value[int(index)]] if -len(value) <= int(index) < len(value) else []
    key = index.strip("'\"")
    return [value[key]] if isinstance(value, dict) and key in value else []


def age(timestamp: Any) -> str:
    """Format the time since a timestamp with one unit: `5s`, `3m`, `4h`, `2d`."""
    if not isinstance(timestamp, str):
        return "<unknown>"
    then = datetime.datetime.fromisoformat(timestamp)
    seconds = max(int((datetime.datetime.now(datetime.UTC) - then).total_seconds()), 0)
    for unit, size_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds // size_s}{unit}"
    return f"{seconds}s"


def _path(expression: str, otherwise: Any = "<none>") -> Callable[[Object], Any]:
    def cell(obj: Object) -> Any:
        value = json_path(obj, expression)
        return otherwise if value is None else value

    return cell


def _pod_status(pod: Object) -> str:
    status = pod.get("status") or {}
    shown = str(status.get("reason") or status.get("phase") or "Unknown")
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        if reason := (state.get("waiting") or {}).get("reason"):
            shown = reason
        elif terminated := state.get("terminated"):
            shown = terminated.get("reason") or f"ExitCode:{terminated.get('exitCode', 0)}"
    return "Terminating" if pod["metadata"].get("deletionTimestamp") else shown


def _pod_ready(pod: Object) -> str:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    ready = sum(bool(status.get("ready")) for status in statuses)
    return f"{ready}/{len((pod.get('spec') or {}).get('containers') or ())}"


def _restarts(pod: Object) -> str:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return str(sum(status.get("restartCount", 0) for status in statuses))


def _service_ports(service: Object) -> str:
    ports = (service.get("spec") or {}).get("ports") or ()
    return ",".join(f"{port['port']}/{port.get('protocol', 'TCP')}" for port in ports) or "<none>"


def _selector(obj: Object) -> str:
    selector = (obj.get("spec") or {}).get("selector") or {}
    labels = selector.get("matchLabels", selector) or {}
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "<none>"


def _node_status(node: Object) -> str:
    ready = json_path(node, '.status.conditions[?(@.type=="Ready")].status')
    return {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")


def _containers(field: str) -> Callable[[Object], str]:
    def cell(obj: Object) -> str:
        return ",".join(
            c.get(field, "") for c in obj["spec"]["template"]["spec"].get("containers") or ()
        )

    return cell


def _hosts(ingress: Object) -> str:
    return (
        ",".join(
            rule["host"]
            for rule in (ingress.get("spec") or {}).get("rules") or ()
            if rule.get("host")
        )
        or "*"
    )


def _ingress_address(ingress: Object) -> str:
    points = json_path(ingress, ".status.loadBalancer.ingress") or ()
    return ",".join(point.get("ip") or point.get("hostname", "") for point in points)


def _event_object(event: Object) -> str:
    target = event.get("involvedObject") or event.get("regarding") or {}
    return f"{target.get('kind', '').lower()}/{target.get('name', '')}"


def _event_age(event: Object) -> str:
    return age(
        event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
    )


def _ready_replicas(obj: Object) -> str:
    return f"{(obj.get('status') or {}).get('readyReplicas', 0)}/{obj['spec'].get('replicas', 0)}"


_NAME: Column = ("Name", "string", 0, lambda obj: obj["metadata"]["name"])
_AGE: Column = ("Age", "string", 0, lambda obj: age(obj["metadata"].get("creationTimestamp")))
_WORKLOAD_DETAILS: tuple[Column, ...] = (
    ("Containers", "string", 1, _containers("name")),
    ("Images", "string", 1, _containers("image")),
    ("Selector", "string", 1, _selector),
)
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "Pod": (
        _NAME,
        ("Ready", "string", 0, _pod_ready),
        ("Status", "string", 0, _pod_status),
        ("Restarts", "string", 0, _restarts),
        _AGE,
        ("IP", "string", 1, _path(".status.podIP")),
        ("Node", "string", 1, _path(".spec.nodeName")),
    ),
    "Deployment": (
        _NAME,
        ("Ready", "string", 0, _ready_replicas),
        ("Up-to-date", "string", 0, _path(".status.updatedReplicas", 0)),
        ("Available", "string", 0, _path(".status.availableReplicas", 0)),
        _AGE,
        *_WORKLOAD_DETAILS,
    ),
    "ReplicaSet": (
        _NAME,
        ("Desired", "integer", 0, _path(".spec.replicas", 0)),
        ("Current", "integer", 0, _path(".status.replicas", 0)),
        ("Ready", "integer", 0, _path(".status.readyReplicas", 0)),
        _AGE,
        *_WORKLOAD_DETAILS,
    ),
    "Service": (
        _NAME,
        ("Type", "string", 0, _path(".spec.type")),
        ("Cluster-IP", "string", 0, _path(".spec.clusterIP")),
        ("External-IP", "string", 0, lambda service: "<none>"),
        ("Port(s)", "string", 0, _service_ports),
        _AGE,
        ("Selector", "string", 1, _selector),
    ),
    "ConfigMap": (_NAME, ("Data", "string", 0, lambda obj: len(obj.get("data") or {})), _AGE),
    "Secret": (
        _NAME,
        ("Type", "string", 0, _path(".type")),
        ("Data", "string", 0, lambda obj: len(obj.get("data") or {})),
        _AGE,
    ),
    "ServiceAccount": (
        _NAME,
        ("Secrets", "string", 0, lambda obj: len(obj.get("secrets") or {})),
        _AGE,
    ),
    "Namespace": (_NAME, ("Status", "string", 0, _path(".status.phase")), _AGE),
    "Node": (
        _NAME,
        ("Status", "string", 0, _node_status),
        ("Roles", "string", 0, _path(".metadata.labels['kubernetes.io/role']")),
        _AGE,
        ("Version", "string", 0, _path(".status.nodeInfo.kubeletVersion", "")),
    ),
    "Event": (
        ("Last Seen", "string", 0, _event_age),
        ("Type", "string", 0, _path(".type", "")),
        ("Reason", "string", 0, _path(".reason", "")),
        ("Object", "string", 0, _event_object),
        (
            "Message",
            "string",
            0,
            lambda event: (event.get("message") or event.get("note") or "").strip(),
        ),
        ("Name", "string", 1, lambda event: event["metadata"]["name"]),
    ),
    "Ingress": (
        _NAME,
        ("Class", "string", 0, _path(".spec.ingressClassName")),
        ("Hosts", "string", 0, _hosts),
        ("Address", "string", 0, _ingress_address),
        ("Ports", "string", 0, lambda obj: "80, 443" if obj["spec"].get("tls") else "80"),
        _AGE,
    ),
    "PodDisruptionBudget": (
        _NAME,
        ("Min Available", "string", 0, _path(".spec.minAvailable", "N/A")),
        ("Max Unavailable", "string", 0, _path(".spec.maxUnavailable", "N/A")),
        ("Allowed Disruptions", "integer", 0, _path(".status.disruptionsAllowed", 0)),
        _AGE,
    ),
    "NetworkPolicy": (
        _NAME,
        (
            "Pod-Selector",
            "string",
            0,
            lambda obj: _selector({"spec": {"selector": obj["spec"].get("podSelector")}}),
        ),
        _AGE,
    ),
    "Lease": (_NAME, ("Holder", "string", 0, _path(".spec.holderIdentity", "")), _AGE),
    "CustomResourceDefinition": (
        _NAME,
        ("Created At", "date", 0, _path(".metadata.creationTimestamp")),
    ),
}


def _custom_column(declared: Object) -> Column:
    """Build the table column for an entry of a CRD's `additionalPrinterColumns`."""
    kind = declared.get("type", "string")

    def cell(obj: Object) -> Any:
        value = json_path(obj, declared["jsonPath"])
        if value is None or kind in ("integer", "number", "boolean"):
            return value
        if kind == "date":
            return age(value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    return declared["name"], kind, declared.get("priority", 0), cell


class TablePrinter:
    """Formats objects of one kind as a table."""

    def __init__(self, resource: Resource, printer_columns: Sequence[Object]) -> None:
        known = {} if resource.custom else _COLUMNS
        self._columns = (
            (_NAME, *map(_custom_column, printer_columns))
            if printer_columns
            else known.get(resource.kind, (_NAME, _AGE))
        )

    def table(
        self, objects: Sequence[Object], metadata: Object, include: str, headers: bool = True
    ) -> Object:
        """Build a metav1.Table with one row per object.

        Args:
            include: what a row contains besides its cells: "Object" (the whole object), "Metadata"
                (only the metadata of the object) or "None".
            headers: whether the table has column definitions.
        """
        definitions = [
            {
                "name": name,
                "type": kind,
                "format": "name" if name == "Name" and index == 0 else "",
                "description": "",
                "priority": priority,
            }
            for index, (name, kind, priority, _) in enumerate(self._columns)
        ]
        return {
            "kind": "Table",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": metadata,
            "columnDefinitions": definitions if headers else [],
            "rows": [self._row(obj, include) for obj in objects],
        }

    def _row(self, obj: Object, include: str) -> Object:
        row: Object = {"cells": [cell(obj) for _, _, _, cell in self._columns]}
        if include == "Object":
            row["object"] = obj
        elif include == "Metadata":
            row["object"] = {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": obj["metadata"],
            }
        return row
