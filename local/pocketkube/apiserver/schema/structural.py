"""Structural schemas of custom resources: pruning, defaults and validation.

The order of the checks and the error messages are those of Kubernetes.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Iterator
from typing import Any

from pocketkube.apiserver.errors import (
    FieldError,
    duplicate,
    invalid_value,
    required,
    type_name,
    unsupported_value,
)
from pocketkube.apiserver.resources import Object
from pocketkube.apiserver.schema.cel import Rules

Schema = dict[str, Any]

_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING = "x-kubernetes-int-or-string"
_TYPE_FIELDS = ("apiVersion", "kind")
_ROOT_FIELDS = (*_TYPE_FIELDS, "metadata")
_FORMATS = {
    "date-time": re.compile(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.IGNORECASE
    ),
    "date": re.compile(r"\d{4}-\d\d-\d\d"),
    "uri": re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+"),
    "uuid": re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE),
    "ipv4": re.compile(r"(\d{1,3}\.){3}\d{1,3}"),
    "email": re.compile(r"[^@\s]+@[^@\s]+"),
}


class StructuralSchema:
    """The compiled schema of one version of a custom resource."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.rules = Rules(schema)

    def prune(self, obj: Object) -> tuple[Object, list[str]]:
        """Return `obj` without fields that are not in the schema, and the paths of those fields."""
        unknown: list[str] = []
        return _prune(obj, self.schema, "", unknown, root=True), unknown

    def default(self, obj: Object) -> Object:
        """Return a copy of the object with the schema's defaults in missing fields."""
        return _default(copy.deepcopy(obj), self.schema)

    def validate(self, obj: Object, old: Object | None) -> list[FieldError]:
        """Validate `obj`, and return the errors. CEL rules run only if there are no other errors.

        Args:
            old: the object before the write; None for a new object.
        """
        properties, missing = self.schema.get("properties") or {}, self.schema.get("required") or ()
        errors = [
            error
            for name, below in properties.items()
            if name not in _TYPE_FIELDS and name in obj
            for error in _validate(obj[name], below, name)
        ]
        errors += [required(name) for name in missing if name not in obj]
        return errors or self.rules.check(obj, old)  # rules expect well-typed objects


def _prune(value: Any, schema: Schema, path: str, unknown: list[str], root: bool = False) -> Any:
    if isinstance(value, list):
        items = schema.get("items") or {}
        return [
            _prune(item, items, f"{path}[{index}]", unknown) for index, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    embedded = schema.get("x-kubernetes-embedded-resource")
    result: Object = {}
    for name, below in value.items():
        here = f"{path}.{name}" if path else name
        if (root or embedded) and name in _ROOT_FIELDS:
            result[name] = below
        elif isinstance(field := properties.get(name, extra), dict):
            result[name] = _prune(below, field, here, unknown)
        elif schema.get(_PRESERVE) or extra is True:
            result[name] = below
        else:
            unknown.append(here)
    return result


def _default(value: Any, schema: Schema) -> Any:
    """Return `value` with the defaults of missing fields. Change maps in place, and copy lists.

    A null counts as missing unless the field is nullable.
    """
    if isinstance(value, list):
        items = schema.get("items") or {}
        return [_default(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    for name, below in properties.items():
        if value.get(name) is None and not below.get("nullable"):
            value.pop(name, None)
        if name not in value and "default" in below:
            value[name] = copy.deepcopy(below["default"])
        if name in value:
            value[name] = _default(value[name], below)
    if isinstance(extra, dict):
        for name in value.keys() - properties.keys():
            value[name] = _default(value[name], extra)
    return value


def _has_type(value: Any, schema: Schema) -> bool:
    if schema.get(_INT_OR_STRING):
        return type_name(value) in ("integer", "string")
    wanted, actual = schema.get("type"), type_name(value)
    if wanted is None or wanted == actual:
        return True
    return (wanted == "number" and actual == "integer") or (
        wanted == "integer" and isinstance(value, float) and value.is_integer()
    )


def _validate(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    """Yield an error for each constraint of `schema` that the field at `path` violates."""
    if value is None and schema.get("nullable"):
        return
    if not _has_type(value, schema):
        wanted = "integer or string" if schema.get(_INT_OR_STRING) else schema["type"]
        actual = type_name(value)
        yield invalid_value(path, actual, f'{path} in body must be of type {wanted}: "{actual}"')
        return
    if (allowed := schema.get("enum")) is not None and value not in allowed:
        yield unsupported_value(path, value, allowed)
    match value:
        case str():
            yield from _validate_string(value, schema, path)
        case bool() | None:
            pass
        case int() | float():
            yield from _validate_number(value, schema, path)
        case list():
            yield from _validate_list(value, schema, path)
        case dict():
            yield from _validate_object(value, schema, path)
    yield from _validate_combinations(value, schema, path)


def _validate_string(value: str, schema: Schema, path: str) -> Iterator[FieldError]:
    if (limit := schema.get("maxLength")) is not None and len(value) > limit:
        yield FieldError(path, "FieldValueTooLong", f"Too long: may not be longer than {limit}")
    if (limit := schema.get("minLength")) is not None and len(value) < limit:
        yield invalid_value(path, value, f"{path} in body should be at least {limit} chars long")
    if (pattern := schema.get("pattern")) and not _pattern(pattern).search(value):
        yield invalid_value(path, value, f"{path} in body should match '{pattern}'")
    form = schema.get("format", "")
    if form in _FORMATS and not _FORMATS[form].fullmatch(value):
        yield invalid_value(path, value, f"{path} in body must be of type {form}: {value!r}")


@functools.cache
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(r"\z", r"\Z"))


def _validate_number(value: float, schema: Schema, path: str) -> Iterator[FieldError]:
    for bound, exclusive, is_beyond, side in (
        ("minimum", "exclusiveMinimum", operator.lt, "greater"),
        ("maximum", "exclusiveMaximum", operator.gt, "less"),
    ):
        if (limit := schema.get(bound)) is not None:
            is_excluded = bool(schema.get(exclusive))
            if is_beyond(value, limit) or (is_excluded and value == limit):
                what = f"{side} than" if is_excluded else f"{side} than or equal to"
                yield invalid_value(path, value, f"{path} in body should be {what} {limit}")
    if (step := schema.get("multipleOf")) and (value / step) % 1:
        yield invalid_value(path, value, f"{path} in body should be a multiple of {step}")
    bits = {"int32": 31, "int64": 63}.get(schema.get("format", ""))
    if bits and not -(2**bits) <= value < 2**bits:
        yield invalid_value(path, value, f"{path} in body must be of type {schema['format']}")


def _validate_length(
    value: list[Any] | Object, what: str, schema: Schema, path: str
) -> Iterator[FieldError]:
    """Yield an error if `value` has more or fewer entries than `schema` allows.

    Args:
        what: "items" if `value` is a list, "properties" if it is an object.
    """
    if (limit := schema.get(f"max{what.title()}")) is not None and len(value) > limit:
        message = f"Too many: {len(value)}: must have at most {limit} items"
        yield FieldError(path, "FieldValueTooMany", message)
    if (limit := schema.get(f"min{what.title()}")) is not None and len(value) < limit:
        yield invalid_value(path, len(value), f"{path} in body should have at least {limit} {what}")


def _validate_list(value: list[Any], schema: Schema, path: str) -> Iterator[FieldError]:
    yield from _validate_length(value, "items", schema, path)
    items = schema.get("items") or {}
    for index, item in enumerate(value):
        yield from _validate(item, items, f"{path}[{index}]")
    seen: list[Any] = []
    for index, item in enumerate(value):
        match schema.get("x-kubernetes-list-type"):
            case "map" if isinstance(item, dict):
                identity: Any = {
                    key: item.get(key) for key in schema.get("x-kubernetes-list-map-keys") or ()
                }
            case "set":
                identity = item
            case _:
                return
        if identity in seen:
            yield duplicate(f"{path}[{index}]", identity)
        seen.append(identity)


def _validate_object(value: Object, schema: Schema, path: str) -> Iterator[FieldError]:
    properties, extra = schema.get("properties") or {}, schema.get("additionalProperties")
    yield from (
        required(f"{path}.{name}") for name in schema.get("required") or () if name not in value
    )
    yield from _validate_length(value, "properties", schema, path)
    for name, below in value.items():
        if isinstance(field := properties.get(name, extra), dict):
            yield from _validate(below, field, f"{path}.{name}")


def _validate_combinations(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    def fits(option: Schema) -> bool:
        return next(_validate(value, option, path), None) is None

    for below in schema.get("allOf") or ():
        yield from _validate(value, below, path)
    if (options := schema.get("anyOf")) and not any(map(fits, options)):
        yield invalid_value(
            path, value, f"{path} in body must validate at least one schema (anyOf)"
        )
    if (options := schema.get("oneOf")) and sum(map(fits, options)) != 1:
        yield invalid_value(
            path, value, f"{path} in body must validate one and only one schema (oneOf)"
        )
    if (refused := schema.get("not")) is not None and fits(refused):
        yield invalid_value(path, value, f"{path} in body must not validate the schema (not)")
