"""Define how strategic merge patches and server-side apply merge lists and maps.

For built-in kinds, the table below has the values of Kubernetes' markers patchMergeKey and
listMapKey. For custom resources, the schema has `x-kubernetes-list-type`,
`x-kubernetes-list-map-keys` and `x-kubernetes-map-type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

#: Field names from the object's root. List items add no element.
Path = tuple[str, ...]


@dataclass(frozen=True)
class FieldType:
    """How the values of one field are merged.

    A `granular` field is a map that is merged key by key. A `map` is a list whose items are
    identified by `keys`, and a `set` is a list of scalars. An `atomic` field is replaced entirely.
    """

    kind: Literal["granular", "atomic", "set", "map"]
    keys: tuple[str, ...] = ()
    #: Merge key of strategic merge patches. If empty, the list is replaced as a whole. With
    #: "$primitive", the items are scalars, and a patch appends the scalars that are missing.
    merge_key: str = ""
    #: Key -> value for items that lack the key.
    key_defaults: Mapping[str, Any] = field(default_factory=dict)


class FieldTypes(Protocol):
    """The `FieldType` of each field of one kind, by path."""

    def at(self, path: Path, value: object) -> FieldType:
        """Return the `FieldType` of the field at `path`.

        Args:
            value: a value of the field. It shows whether the field is a map or a list.
        """
        ...


GRANULAR = FieldType("granular")
ATOMIC = FieldType("atomic")
SET = FieldType("set", merge_key="$primitive")


def _keyed(*keys: str, merge: str | None = None) -> FieldType:
    defaults = {"protocol": "TCP"} if "protocol" in keys else {}
    return FieldType("map", keys, keys[0] if merge is None else merge, defaults)


_CONTAINER = {
    "ports": _keyed("containerPort", "protocol"),
    "env": _keyed("name"),
    "volumeMounts": _keyed("mountPath"),
    "volumeDevices": _keyed("devicePath"),
    "resources.claims": _keyed("name", merge=""),
}
_POD_SPEC = {
    "containers": _keyed("name"),
    "initContainers": _keyed("name"),
    "ephemeralContainers": _keyed("name"),
    "volumes": _keyed("name"),
    "imagePullSecrets": _keyed("name"),
    "hostAliases": _keyed("ip"),
    "topologySpreadConstraints": _keyed("topologyKey", "whenUnsatisfiable"),
    "nodeSelector": ATOMIC,
    **{
        f"{group}.{name}": kind
        for group in ("containers", "initContainers")
        for name, kind in _CONTAINER.items()
    },
}
_METADATA = {"metadata.finalizers": SET, "metadata.ownerReferences": _keyed("uid")}
_CONDITIONS = {"status.conditions": _keyed("type")}


def _pod_spec_at(prefix: str) -> dict[str, FieldType]:
    return {f"{prefix}.{name}": kind for name, kind in _POD_SPEC.items()}


_WORKLOAD = {"spec.selector": ATOMIC, **_pod_spec_at("spec.template.spec")}
_BY_KIND: dict[str, dict[str, FieldType]] = {
    "Pod": {**_pod_spec_at("spec"), "status.podIPs": _keyed("ip")},
    "Deployment": _WORKLOAD,
    "ReplicaSet": _WORKLOAD,
    "Service": {"spec.ports": _keyed("port", "protocol"), "spec.selector": ATOMIC},
    "ServiceAccount": {
        "secrets": _keyed("name"),
        "imagePullSecrets": FieldType("atomic", merge_key="name"),
    },
    "Node": {
        "status.addresses": _keyed("type"),
        "spec.taints": FieldType("atomic", merge_key="key"),
        "spec.podCIDRs": SET,
    },
    "PodDisruptionBudget": {"spec.selector": ATOMIC},
    "NetworkPolicy": {"spec.podSelector": ATOMIC},
}


class BuiltinFieldTypes:
    """Field types of a built-in kind. By default, maps merge by key, and lists are replaced."""

    def __init__(self, kind: str) -> None:
        self._table = {**_METADATA, **_CONDITIONS, **_BY_KIND.get(kind, {})}

    def at(self, path: Path, value: object) -> FieldType:
        known = self._table.get(".".join(path))
        return known or (GRANULAR if isinstance(value, dict) else ATOMIC)


class CustomFieldTypes:
    """Field types of one version of a custom resource, read from its schema."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._metadata = BuiltinFieldTypes("")
        self._known: dict[tuple[Path, bool], FieldType] = {}

    def at(self, path: Path, value: object) -> FieldType:
        if path[:1] == ("metadata",):
            return self._metadata.at(path, value)
        key = (path, isinstance(value, dict))
        if key not in self._known:
            self._known[key] = self._resolve(path, value)
        return self._known[key]

    def _resolve(self, path: Path, value: object) -> FieldType:
        schema = self._schema
        for name in path:
            while schema.get("type") == "array":
                schema = schema.get("items") or {}
            properties = schema.get("properties") or {}
            extra = schema.get("additionalProperties")
            schema = properties.get(name) or (extra if isinstance(extra, dict) else {})
        if isinstance(value, dict):
            return ATOMIC if schema.get("x-kubernetes-map-type") == "atomic" else GRANULAR
        match schema.get("x-kubernetes-list-type"):
            case "set":
                return SET
            case "map":
                keys = tuple(schema.get("x-kubernetes-list-map-keys") or ())
                properties = (schema.get("items") or {}).get("properties") or {}
                defaults = {
                    key: properties[key]["default"]
                    for key in keys
                    if "default" in properties.get(key, {})
                }
                return FieldType("map", keys, "", defaults)
        return ATOMIC
