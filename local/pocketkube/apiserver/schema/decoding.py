"""Decode objects of built-in kinds: drop unknown fields, and refuse fields of the wrong type.

The fields and types come from the generated models of the official Python client.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from pocketkube.apiserver.errors import type_name
from pocketkube.apiserver.resources import Object

_MODEL_NAMES = {
    ("", "Event"): "CoreV1Event",
    ("events.k8s.io", "Event"): "EventsV1Event",
    ("authentication.k8s.io", "TokenRequest"): "AuthenticationV1TokenRequest",
}
_CONTAINER = re.compile(r"^(list|dict)[\[(](?:str, )?(.+)[\])]$", re.IGNORECASE)
_QUANTITIES = ("limits", "requests", "capacity", "allocatable", "overhead")
_JSON_TYPES = {
    "str": ("string",),
    "datetime": ("string",),
    "bytes": ("string",),
    "bytearray": ("string",),
    "int": ("integer",),
    "bool": ("boolean",),
    "float": ("integer", "number"),
}


@functools.cache
def _fields(model: str) -> dict[str, str]:
    """Return JSON field name -> declared type for a model class of the Kubernetes client."""
    from kubernetes.client import models  # takes most of a second

    cls = getattr(models, model)
    return {cls.attribute_map[attribute]: kind for attribute, kind in cls.openapi_types.items()}


class DecodeError(Exception):
    """A field has the wrong type. The message names the field."""


def decode(group: str, version: str, kind: str, obj: Object) -> tuple[Object, list[str]]:
    """Return the object without null and unknown fields, and the paths of the unknown fields.

    Raises:
        DecodeError: a field has the wrong type.
    """
    model = _MODEL_NAMES.get((group, kind), f"{version.capitalize()}{kind}")
    unknown: list[str] = []
    return _object(model, obj, "", unknown), unknown


def _object(model: str, value: Any, path: str, unknown: list[str]) -> Object:
    if not isinstance(value, dict):
        raise DecodeError(f"{path or 'the body'}: expected an object, got {type_name(value)}")
    fields = _fields(model)
    result: Object = {}
    for name, below in value.items():
        here = f"{path}.{name}" if path else name
        if name not in fields:
            unknown.append(here)
        elif below is not None:
            result[name] = _value(fields[name], below, here, unknown)
    return result


def _value(kind: str, value: Any, path: str, unknown: list[str]) -> Any:
    if match := _CONTAINER.match(kind):
        of = match[2]
        if match[1].lower() == "list":
            if not isinstance(value, list):
                raise DecodeError(f"{path}: expected an array, got {type_name(value)}")
            return [_value(of, item, f"{path}[{i}]", unknown) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            raise DecodeError(f"{path}: expected an object, got {type_name(value)}")
        if path.rpartition(".")[2] in _QUANTITIES:  # `cpu: 2` is a quantity as well
            value = {
                key: str(item) if type_name(item) in ("integer", "number") else item
                for key, item in value.items()
            }
        return {
            key: _value(of, item, f"{path}.{key}", unknown)
            for key, item in value.items()
            if item is not None
        }
    if kind == "object":
        return value
    if expected := _JSON_TYPES.get(kind):
        if type_name(value) not in expected:
            raise DecodeError(
                f"{path}: cannot unmarshal {type_name(value)} into a field of type {expected[-1]}"
            )
        return value
    return _object(kind, value, path, unknown)
