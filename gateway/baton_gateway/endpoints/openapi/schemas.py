"""The JSON schemas of request and response bodies, for `/openapi.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from baton_gateway.endpoints.openapi.operations import OPERATIONS, Struct
from baton_protocol import sampling_params
from baton_protocol.options.field_comments import field_comments
from baton_text import chat_messages
from baton_text.requests import completion_request, generation_request, responses_request
from baton_text.responses import anthropic, openai, responses_api

#: The values that requests may send in an unsupported field.
_EMPTY_VALUES: tuple[object, ...] = (None, False, 0, "", [], {})
_REF = "#/components/schemas/{name}"
#: Values of constants, by name. `#:` comments of fields contain the names.
CONSTANTS: dict[str, object] = {
    **{
        name: value
        for module in (sampling_params, generation_request, completion_request, responses_request)
        for name, value in vars(module).items()
    },
    "ROLES": ", ".join(sorted(chat_messages.ROLES)),
}
#: Patterns of the bounds in comments of fields. Names of groups are keywords of JSON schemas.
_BOUNDS = (
    r"(?P<minimum>-?\d+)\.\.(?P<maximum>[\d.]+)",
    r"(?P<minimum>-?\d+) or more",
    r"above (?P<exclusiveMinimum>\d+), at most (?P<maximum>\d+)",
)


def make_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of all bodies and of the structs in them, by name of the struct."""
    requests = [each.body for each in OPERATIONS.values() if each.body is not None]
    responses: list[Struct] = [
        openai.ErrorBody,
        anthropic.MessageError,
        responses_api.ResponseError,
    ]
    for operation in OPERATIONS.values():
        responses += operation.events
        if operation.response is not None:
            responses.append(operation.response)
    schemas = _components([*requests, *responses])
    for name, kind in _structs([*requests, *responses]).items():
        _describe(schemas[name], kind)
    for name in schemas.keys() - _components(requests).keys():
        _describe_response(schemas[name])
    return schemas


def reference(kind: Struct) -> dict[str, str]:
    """Return a JSON `$ref` to the schema of `kind`."""
    return {"$ref": _REF.format(name=kind.__name__)}


def fill_constants(text: str, constants: dict[str, object]) -> str:
    """Return `text` with each name in `constants` replaced by its value."""
    return re.sub(r"\b[A-Z][A-Z_]+\b", lambda name: str(constants.get(name[0], name[0])), text)


def _components(kinds: Iterable[Struct]) -> dict[str, dict[str, Any]]:
    return msgspec.json.schema_components(kinds, ref_template=_REF)[1]


def _structs(kinds: Iterable[Any]) -> dict[str, Struct]:
    """Return the structs among `kinds` and in the types of their fields, by name."""
    found: dict[str, Struct] = {}
    pending = [*kinds]
    while pending:
        kind = pending.pop()
        pending += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind.__name__ not in found:
                pending += [field.type for field in msgspec.structs.fields(kind)]
            found[kind.__name__] = kind
    return found


def _describe(schema: dict[str, Any], kind: Struct) -> None:
    """Add descriptions and bounds to `schema`, from the comments of the fields of `kind`."""
    comments = field_comments(kind)
    for name, field in schema["properties"].items():
        if name in getattr(kind, "UNSUPPORTED", ()):
            field.update(description="Not supported.", enum=list(_EMPTY_VALUES))
        elif name in comments:
            text = fill_constants(comments[name], CONSTANTS)
            field["description"] = text
            _bound(field, text.partition(" Bounds: ")[2].rstrip("."))


def _bound(field: dict[str, Any], bounds: str) -> None:
    """Add the bounds of a number, or the allowed values of a string, to the schema of a field.

    Args:
        bounds: text such as `0..2`, `1 or more` or `auto, none`. Other texts are ignored.
    """
    limits = next((found for each in _BOUNDS if (found := re.fullmatch(each, bounds))), None)
    for branch in field.get("anyOf", [field]):
        target = branch.get("additionalProperties", branch)
        if limits is not None and target.get("type") in ("integer", "number"):
            target.update({name: json.loads(text) for name, text in limits.groupdict().items()})
        elif target.get("type") == "string" and re.fullmatch(r"[a-z_]+(, [a-z_]+)*", bounds):
            target["enum"] = bounds.split(", ")


def _describe_response(schema: dict[str, Any]) -> None:
    """Change the schema of a struct to describe what the gateway sends, not what it would parse.

    The gateway always sends a field that has a default, so the field becomes required. The value of
    such a string field is always the default, so the field gets a `const`. A field whose default is
    UNSET may be missing, and stays optional.
    """
    for name, field in schema["properties"].items():
        if "default" not in field:
            continue
        schema["required"].append(name)
        default = field.pop("default")
        if field.get("type") == "string":
            field["const"] = default
