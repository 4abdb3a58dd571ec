"""JSON patch (RFC 6902), JSON merge patch (RFC 7386) and strategic merge patch.

All functions are pure and return a new object. Server-side apply is in server_side_apply.py.
"""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import msgspec

from pocketkube.apiserver.errors import ApiError, bad_request
from pocketkube.apiserver.resources import Object, Resource
from pocketkube.apiserver.schema.merge_strategy import FieldTypes, Path

#: Maximum size of all values that one JSON patch copies, in bytes of JSON. Each copy could double
#: the object.
MAX_COPIED_BYTES = 2**20


def media_types(resource: Resource) -> list[str]:
    """Return the media types of patches that objects of `resource` accept."""
    accepted = [
        "application/json-patch+json",
        "application/merge-patch+json",
        "application/apply-patch+yaml",
    ]
    if not resource.custom:
        accepted.insert(2, "application/strategic-merge-patch+json")
    return accepted


def json_patch(original: Object, operations: Any) -> Object:
    """Apply a JSON patch, and return the patched object.

    Raises:
        ApiError: 400 for a malformed patch, 413 if it copies more than MAX_COPIED_BYTES, and 422
            for an operation that does not fit the object.
    """
    if not isinstance(operations, list):
        raise bad_request("a JSON patch is a list of operations")
    result, copied = copy.deepcopy(original), 0
    try:
        jsonpatch.JsonPatch(operations)  # checks all operations before the first is applied
        for operation in operations:
            if operation["op"] == "copy":
                source = jsonpatch.JsonPointer(operation["from"]).resolve(result)
                copied += len(msgspec.json.encode(source))
                if copied > MAX_COPIED_BYTES:
                    raise ApiError(413, "RequestEntityTooLarge", "the JSON patch copies too much")
            result = jsonpatch.apply_patch(result, [operation], in_place=True)
        return result
    except jsonpatch.InvalidJsonPatch as error:
        raise bad_request(f"error decoding patch: {error}") from error
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, KeyError) as error:
        raise ApiError(
            422,
            "Invalid",
            f"the server rejected our request due to an error in our request: {error}",
        ) from error


def merge_patch(original: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(original) if isinstance(original, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def strategic_merge_patch(original: Object, patch: Object, types: FieldTypes) -> Object:
    """Apply a strategic merge patch, and return the patched object.

    Maps are merged by key, and lists by the merge key of their field. The directives `$patch`,
    `$retainKeys`, `$deleteFromPrimitiveList` and `$setElementOrder` are supported.

    Raises:
        ApiError: 400 for an unknown directive or an item without its merge key.
    """
    return _merge_map(original, patch, types, ())


def _merge_map(original: Object, patch: Object, types: FieldTypes, path: Path) -> Object:
    match patch.get("$patch"):
        case "replace":
            return {key: value for key, value in patch.items() if key != "$patch"}
        case "delete":
            return {}
        case None | "merge":
            pass
        case other:
            raise bad_request(
                f"unknown $patch directive {other!r} at .{'.'.join(path)}; "
                "use replace, merge or delete"
            )
    result = dict(original)
    if (retained := patch.get("$retainKeys")) is not None:
        result = {key: value for key, value in result.items() if key in retained}
    orders: dict[str, list[Any]] = {}
    for key, value in patch.items():
        if key in ("$patch", "$retainKeys"):
            continue
        if key.startswith("$setElementOrder/"):
            orders[key.removeprefix("$setElementOrder/")] = value
        elif key.startswith("$deleteFromPrimitiveList/"):
            name = key.removeprefix("$deleteFromPrimitiveList/")
            result[name] = [item for item in result.get(name) or [] if item not in value]
        elif value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            below = result.get(key)
            result[key] = _merge_map(
                below if isinstance(below, dict) else {}, value, types, (*path, key)
            )
        elif isinstance(value, list):
            result[key] = _merge_list(result.get(key) or [], value, types, (*path, key))
        else:
            result[key] = value
    for name, order in orders.items():
        if name in result:
            result[name] = _ordered(result[name], order, types.at((*path, name), []).merge_key)
    return result


def _merge_list(original: list[Any], patch: list[Any], types: FieldTypes, path: Path) -> list[Any]:
    merge_key = types.at(path, patch).merge_key
    if not merge_key:
        return [_without_directives(item) for item in patch if not _is_directive(item)]
    if merge_key == "$primitive":
        return [*original, *(item for item in patch if item not in original)]
    if any(_is_directive(item) and item["$patch"] == "replace" for item in patch):
        return [
            _without_directives(item)
            for item in patch
            if not (_is_directive(item) and len(item) == 1)
        ]
    result = list(original)
    for item in patch:
        if not isinstance(item, dict) or merge_key not in item:
            raise bad_request(
                f"map at .{'.'.join(path)} does not contain declared merge key: {merge_key}"
            )
        index = next(
            (i for i, old in enumerate(result) if old.get(merge_key) == item[merge_key]), None
        )
        if item.get("$patch") == "delete":
            if index is not None:
                del result[index]
        elif index is None:
            result.append(_merge_map({}, item, types, path))
        else:
            result[index] = _merge_map(result[index], item, types, path)
    return result


def _is_directive(item: Any) -> bool:
    return isinstance(item, dict) and "$patch" in item


def _without_directives(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_directives(below)
            for key, below in value.items()
            if not key.startswith("$")
        }
    return value


def _ordered(items: list[Any], order: list[Any], merge_key: str) -> list[Any]:
    """Return the items: first those listed in `order`, in that order, then all others.

    An entry of `order` is a scalar, or a map with the `merge_key` of an item.
    """
    if merge_key and merge_key != "$primitive":
        wanted = [entry.get(merge_key) for entry in order]
        keys = [item.get(merge_key) for item in items]
    else:
        wanted, keys = order, items
    rank = {key: index for index, key in enumerate(wanted)}
    return [
        item
        for _, item in sorted(
            zip(keys, items, strict=True), key=lambda pair: rank.get(pair[0], len(rank))
        )
    ]
