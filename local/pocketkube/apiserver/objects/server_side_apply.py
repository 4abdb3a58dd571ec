"""Server-side apply and field ownership (metadata.managedFields).

A field set is a set of paths. A path is a tuple of the elements of Kubernetes' FieldsV1 format:
- `f:name` for a key of a map,
- `k:{...}` for an item of a keyed list,
- `v:...` for a member of a set,
- `.`, as the last element, for the item itself.

`apply()` merges a manager's configuration into the live object. It removes the fields that only
this manager owned and no longer sets. It refuses to change a field that another manager owns,
unless the request is forced. `track()` records the owners after every write.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pocketkube.apiserver.errors import apply_conflict, bad_request
from pocketkube.apiserver.resources import Object
from pocketkube.apiserver.schema.merge_strategy import FieldType, FieldTypes, Path

FieldPath = tuple[str, ...]
FieldSet = frozenset[FieldPath]

#: Fields that the API server sets. They have no owner.
_UNTRACKED = ("apiVersion", "kind")
_UNTRACKED_METADATA = (
    "name",
    "namespace",
    "generateName",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "resourceVersion",
    "generation",
    "managedFields",
    "selfLink",
)


@dataclass(frozen=True)
class Manager:
    """The identity of a field manager, as in an entry of managedFields."""

    name: str
    #: Apply or Update.
    operation: str
    api_version: str
    subresource: str = ""

    @classmethod
    def of(cls, entry: Object) -> Manager:
        return cls(
            entry["manager"], entry["operation"], entry["apiVersion"], entry.get("subresource", "")
        )


def apply(
    live: Object, applied: Object, manager: Manager, types: FieldTypes, force: bool
) -> tuple[Object, FieldSet]:
    """Merge `applied` into `live`. Return the merged object and the fields that `manager` owns.

    Raises:
        ApiError: 409, the merge would change fields that other managers own, and `force` is False.
    """
    applied = _without_nulls(applied)
    owned = frozenset(leaves(_tracked(applied), types))
    owners = managed_fields(live)
    previously = owners.pop(manager, frozenset())
    merged = _merge(live, applied, types, ())
    merged["metadata"] = {
        **merged["metadata"],
        **{k: v for k, v in live["metadata"].items() if k in _UNTRACKED_METADATA},
    }
    others = frozenset().union(*owners.values()) if owners else frozenset()
    # Remove list items before single fields, because an item is found by its key fields.
    for path in sorted(previously - owned - others, key=lambda path: (path[-1] != ".", len(path))):
        target = path[:-1] if path[-1] == "." else path
        # Keep a field that is owned itself or contains an owned field.
        if not any(kept[: len(target)] == target for kept in owned | others):
            merged = _remove(merged, path, types)
    if not force:
        before, after = leaves(_tracked(live), types), leaves(_tracked(merged), types)
        changed = {
            path for path, value in after.items() if path not in before or before[path] != value
        }
        conflicts = [
            (
                f'"{owner.name}"'
                + (f" using {owner.api_version}" if owner.operation == "Update" else ""),
                show(path),
            )
            for owner, fields in owners.items()
            for path in sorted(fields & changed)
        ]
        if conflicts:
            raise apply_conflict(conflicts)
    return merged, owned


def track(
    live: Object | None,
    stored: Object,
    manager: Manager,
    owned: FieldSet | None,
    types: FieldTypes,
    now: str,
) -> None:
    """Set metadata.managedFields of `stored` after a write by `manager`.

    Other managers no longer own the fields that the write changed or removed.

    Args:
        live: the object before the write; None for a new object.
        owned: the fields that `apply()` returned; None after any other write. If None, `manager`
            owns the fields that it owned before, and the fields that the write changed.
        now: the time of the write, in RFC 3339 format.
    """
    before = leaves(_tracked(live), types) if live else {}
    after = leaves(_tracked(stored), types)
    changed = frozenset(
        path for path, value in after.items() if path not in before or before[path] != value
    )
    gone = frozenset(before) - frozenset(after)
    owners = managed_fields(live) if live else {}
    times = {
        Manager.of(e): e.get("time", now)
        for e in (live or {}).get("metadata", {}).get("managedFields", [])
    }
    mine = owners.pop(manager, frozenset())
    kept = {owner: fields - changed - gone for owner, fields in owners.items()}
    new = owned if owned is not None else (mine | changed) - gone
    if new != mine or manager not in times:
        times[manager] = now
    entries = [(owner, fields) for owner, fields in [*kept.items(), (manager, new)] if fields]
    stored["metadata"]["managedFields"] = [
        _entry(owner, fields, times[owner]) for owner, fields in entries
    ]


def _entry(manager: Manager, fields: FieldSet, time: str) -> Object:
    entry: Object = {
        "manager": manager.name,
        "operation": manager.operation,
        "apiVersion": manager.api_version,
        "time": time,
        "fieldsType": "FieldsV1",
        "fieldsV1": _encode(fields),
    }
    if manager.subresource:
        entry["subresource"] = manager.subresource
    return entry


def managed_fields(obj: Object) -> dict[Manager, FieldSet]:
    """Return the fields that each manager owns, from metadata.managedFields.

    Raises:
        ApiError: 400, an entry is malformed.
    """
    fields = {}
    for index, entry in enumerate(obj["metadata"].get("managedFields") or []):
        try:
            fields[Manager.of(entry)] = frozenset(_decode(entry.get("fieldsV1") or {}))
        except (KeyError, TypeError, AttributeError) as error:
            raise bad_request(
                f"metadata.managedFields[{index}] must have manager, operation, apiVersion and a "
                "valid fieldsV1; send the entry as the server returned it, or none"
            ) from error
    return fields


def show(path: FieldPath) -> str:
    """Format a field path as Kubernetes does: `.spec.containers[name="x"].image`."""
    text = ""
    for element in path:
        if element.startswith("f:"):
            text += f".{element[2:]}"
        elif element.startswith("k:"):
            keys = json.loads(element[2:])
            text += (
                "["
                + ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(keys.items()))
                + "]"
            )
        elif element.startswith("v:"):
            text += f"[={element[2:]}]"
    return text


def leaves(obj: Object, types: FieldTypes) -> dict[FieldPath, Any]:
    """Return path -> value for each field of `obj` that can have its own owner.

    An item of a keyed list also has an entry. Its path ends with `.`, and its value is None.
    """
    found: dict[FieldPath, Any] = {}
    _collect(obj, types, (), (), found)
    return found


def _collect(
    value: Any, types: FieldTypes, names: Path, path: FieldPath, found: dict[FieldPath, Any]
) -> None:
    """Add the path and the value of each leaf of `value` to `found`.

    For example, `{"containers": [{"name": "a", "image": "x"}]}` adds:

        ("f:containers", 'k:{"name":"a"}', ".")        None
        ("f:containers", 'k:{"name":"a"}', "f:name")   "a"
        ("f:containers", 'k:{"name":"a"}', "f:image")  "x"

    Args:
        names: field names from the object's root to `value`. They select the `FieldType`.
        path: path from the object's root to `value`.
    """
    if not isinstance(value, (dict, list)):
        found[path] = value
        return
    kind = types.at(names, value)
    if isinstance(value, dict):
        if kind.kind == "atomic" or (not value and path):
            found[path] = value
            return
        for name, below in value.items():
            _collect(below, types, (*names, name), (*path, f"f:{name}"), found)
    elif kind.kind == "set":
        for member in value:
            found[(*path, _member(member))] = member
    elif kind.kind == "map":
        for item in value:
            element = (*path, _key(item, kind, names))
            found[(*element, ".")] = None
            for name, below in item.items():
                _collect(below, types, (*names, name), (*element, f"f:{name}"), found)
    else:
        found[path] = value


def _key(item: Any, kind: FieldType, names: Path) -> str:
    """Return the path element that identifies `item` in the keyed list at the field `names`."""
    where = ".".join(names)
    if not isinstance(item, dict):
        raise bad_request(
            f"{where}: every item must be an object with {' and '.join(kind.keys)}, not {item!r}"
        )
    keys = {key: item.get(key, kind.key_defaults.get(key)) for key in kind.keys}
    if missing := [key for key, value in keys.items() if value is None and len(kind.keys) == 1]:
        raise bad_request(f"{where}: an item lacks {missing[0]}, which is the key of the list")
    return "k:" + json.dumps(
        {k: v for k, v in keys.items() if v is not None}, sort_keys=True, separators=(",", ":")
    )


def _member(value: Any) -> str:
    return "v:" + json.dumps(value, separators=(",", ":"))


def _merge(live: Any, applied: Any, types: FieldTypes, names: Path) -> Any:
    """Return a copy of `live` into which `applied` is merged.

    For example, with containers keyed by name:

        live     [{"name": "a", "image": "x", "tty": true}, {"name": "b"}]
        applied  [{"name": "a", "image": "y"}, {"name": "c"}]
        result   [{"name": "a", "image": "y", "tty": true}, {"name": "b"}, {"name": "c"}]

    Args:
        names: field names from the object's root to both values. They select the `FieldType`.
    """
    if isinstance(live, dict) and isinstance(applied, dict):
        if types.at(names, applied).kind == "atomic":
            return copy.deepcopy(applied)
        result = dict(live)
        for name, value in applied.items():
            result[name] = (
                _merge(live[name], value, types, (*names, name))
                if name in live
                else copy.deepcopy(value)
            )
        return result
    if isinstance(live, list) and isinstance(applied, list):
        kind = types.at(names, applied)
        if kind.kind == "set":
            return [*live, *(member for member in applied if member not in live)]
        if kind.kind == "map":
            wanted = {_key(item, kind, names): item for item in applied}
            items = [
                _merge(item, wanted.pop(_key(item, kind, names), {}), types, names) for item in live
            ]
            return [*items, *copy.deepcopy(list(wanted.values()))]
    return copy.deepcopy(applied)


def _remove(obj: Object, path: FieldPath, types: FieldTypes) -> Object:
    """Return `obj` without the field at `path`, and without each map or list that becomes empty.

    Maps and lists along the path are copied, because other objects may share them. For example:

        obj     {"metadata": {"name": "n", "labels": {"app": "a"}}}
        path    ("f:metadata", "f:labels", "f:app")
        result  {"metadata": {"name": "n"}}
    """
    target = path[:-1] if path[-1] == "." else path

    def without(value: Any, rest: FieldPath, names: Path) -> Any:
        head, tail = rest[0], rest[1:]
        if head.startswith("f:"):
            name = head[2:]
            if not isinstance(value, dict) or name not in value:
                return value
            if not tail:
                return {key: below for key, below in value.items() if key != name}
            below = without(value[name], tail, (*names, name))
            kept = {key: old for key, old in value.items() if key != name}
            return kept if below in ({}, []) and below != value[name] else {**value, name: below}
        if not isinstance(value, list):
            return value
        if head.startswith("v:"):
            return [member for member in value if _member(member) != head]
        kind = types.at(names, value)
        if not tail:
            return [item for item in value if _key(item, kind, names) != head]
        return [
            without(item, tail, names) if _key(item, kind, names) == head else item
            for item in value
        ]

    result: Object = without(obj, target, ())
    return result


def _tracked(obj: Object) -> Object:
    """Return `obj` without the fields that no manager can own, such as metadata.uid."""
    metadata = {
        key: value
        for key, value in (obj.get("metadata") or {}).items()
        if key not in _UNTRACKED_METADATA
    }
    rest = {key: value for key, value in obj.items() if key not in (*_UNTRACKED, "metadata")}
    return {**rest, "metadata": metadata} if metadata else rest


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(below) for key, below in value.items() if below is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _encode(fields: Iterable[FieldPath]) -> Object:
    root: Object = {}
    for path in sorted(fields):
        node = root
        for element in path:
            node = node.setdefault(element, {})
    return root


def _decode(node: Object, path: FieldPath = ()) -> Iterable[FieldPath]:
    if not node:
        if path:
            yield path
        return
    for element, below in node.items():
        yield from _decode(below, (*path, element))
