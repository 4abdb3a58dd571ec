"""Pod template overlays: what a user adds to or changes in the pods the operator builds."""

from __future__ import annotations

from typing import Any

from baton_operator.builders.free_form_fields import must_be

_MERGE_KEYS = {"volumeMounts": "mountPath", "ports": "name", "hostAliases": "ip"}
"""Lists of objects that do not merge by `name`, or merge by it although Kubernetes' own key differs."""
_APPENDED = {"tolerations", "imagePullSecrets"}
_REPLACED = {"env"}
"""Lists whose items are replaced by those of the same key: half a value and half a reference to one would be no variable."""


def merge(base: Any, overlay: Any, path: str) -> Any:
    """`overlay` over `base`: objects merge, lists of named objects merge by name, anything else is replaced; null removes.

    Args:
        path: of both, for messages.

    Raises:
        ValueError: naming the field: it is no object or list where `base` has one, or an item of a merged list has no merge key.
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
    for number, item in enumerate(overlay):
        if not isinstance(item, dict) or not isinstance(item.get(key), str):
            raise must_be(f"an object with {key!r}", f"{path}[{number}]", item)
        name = item[key]
        merged[name] = (
            merge(merged[name], item, f"{path}[{name}]") if name in merged and not whole else item
        )
    return list(merged.values())
