"""Merge a pod template overlay: the user's changes to the pods that the operator builds."""

from __future__ import annotations

import json
from typing import Any

from baton_operator.builders.pod_template.free_form_fields import must_be

#: Merge keys of lists that do not merge by `name`. `ports` merges by `name` here, but by
#: `containerPort` in Kubernetes.
_MERGE_KEYS = {"volumeMounts": "mountPath", "ports": "name", "hostAliases": "ip"}
#: Lists without a merge key. Items of the overlay are appended.
_APPENDED = {"tolerations", "imagePullSecrets"}
#: Lists whose items replace the item with the same key instead of merging with it. A variable with
#: both a value and a reference would be invalid.
_REPLACED = {"env"}


def merge(base: Any, overlay: Any, path: str) -> Any:
    """Return `base` with the changes in `overlay`.

    Objects are merged field by field, and lists of objects by their merge key. An item of `env`
    replaces the whole item with the same key. Items of the lists in `_APPENDED` are appended. Other
    values of `overlay` replace those of `base`. A null in `overlay` removes the field.

    Args:
        path: path of `overlay` in the spec, for error messages.

    Raises:
        ValueError: a field is an object or list in `base`, but not in `overlay`; an item of a
            merged list has no merge key; or two items of a list other than `env` have the same
            key. The message names the field.
    """
    if isinstance(base, dict):
        if not isinstance(overlay, dict):
            raise must_be("an object", path, overlay)
        merged = dict(base)
        for key, value in overlay.items():
            if value is None:
                merged.pop(key, None)
            elif key in merged:
                merged[key] = merge(merged[key], value, f"{path}.{key}")
            else:
                merged[key] = value
        return merged
    if isinstance(base, list):
        if not isinstance(overlay, list):
            raise must_be("a list", path, overlay)
        field = path.rpartition(".")[2]
        if field in _APPENDED:
            return base + [item for item in overlay if item not in base]
        key = _MERGE_KEYS.get(field, "name")
        if base and all(isinstance(item, dict) and isinstance(item.get(key), str) for item in base):
            return _merge_named(base, overlay, key, path)
    return overlay


def _merge_named(
    base: list[dict[str, Any]], overlay: list[Any], key: str, path: str
) -> list[dict[str, Any]]:
    whole = path.rpartition(".")[2] in _REPLACED
    merged = {item[key]: item for item in base}
    seen: set[str] = set()
    for number, item in enumerate(overlay):
        if not isinstance(item, dict) or not isinstance(item.get(key), str):
            raise must_be(f"an object with {key!r}", f"{path}[{number}]", item)
        name = item[key]
        if name in seen and not whole:
            raise ValueError(f"{path} has two items with the {key} {json.dumps(name)}")
        seen.add(name)
        merged[name] = (
            merge(merged[name], item, f"{path}[{name}]") if name in merged and not whole else item
        )
    return list(merged.values())
