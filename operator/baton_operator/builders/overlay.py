"""Pod template overlays: what a user adds to or changes in the pods the operator builds."""

from __future__ import annotations

from typing import Any

_MERGE_KEYS = {"volumeMounts": "mountPath", "ports": "name", "hostAliases": "ip"}
"""Lists of objects that do not merge by `name`, or merge by it although Kubernetes' own key differs."""
_APPENDED = {"tolerations", "imagePullSecrets"}
_REPLACED = {"env"}
"""Lists whose items are replaced by those of the same key: half a value and half a reference to one would be no variable."""


def merge(base: Any, overlay: Any, field: str = "") -> Any:
    """`overlay` over `base`: objects merge, lists of named objects merge by name, anything else is replaced; null removes.

    Raises:
        ValueError: an item of a merged list has no merge key.
    """
    if isinstance(base, dict) and isinstance(overlay, dict):
        merged = dict(base)
        for key, value in overlay.items():
            if value is None:
                merged.pop(key, None)
            elif key in merged:
                merged[key] = merge(merged[key], value, key)
            else:
                merged[key] = value
        return merged
    if isinstance(base, list) and isinstance(overlay, list):
        if field in _APPENDED:
            return base + [item for item in overlay if item not in base]
        if base and all(isinstance(item, dict) for item in base):
            return _merge_named(base, overlay, field)
    return overlay


def _merge_named(base: list[dict[str, Any]], overlay: list[Any], field: str) -> list[dict[str, Any]]:
    key = _MERGE_KEYS.get(field, "name")
    if not all(key in item for item in base):
        return overlay
    whole = field in _REPLACED
    merged = {item[key]: item for item in base}
    for item in overlay:
        if not isinstance(item, dict) or not isinstance(item.get(key), str):
            raise ValueError(f"template: every item of {field} needs {key!r}, got {item!r}")
        merged[item[key]] = merge(merged[item[key]], item) if item[key] in merged and not whole else item
    return list(merged.values())
