"""Errors of the API server, as metav1.Status.

The functions here build an `ApiError`, which the caller raises. The HTTP server sends the Status of
the error as the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pocketkube.apiserver.resources import Resource


@dataclass(frozen=True)
class FieldError:
    """The error in one field: a cause in the `details` of a Status whose reason is Invalid."""

    field: str
    #: For example FieldValueInvalid or FieldValueRequired.
    reason: str
    #: The message without the field's name, for example `Required value`.
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def invalid_value(field: str, value: object, detail: str) -> FieldError:
    return FieldError(field, "FieldValueInvalid", f"Invalid value: {_show(value)}: {detail}")


def required(field: str, detail: str = "") -> FieldError:
    return FieldError(
        field, "FieldValueRequired", f"Required value: {detail}" if detail else "Required value"
    )


def unsupported_value(field: str, value: object, allowed: Sequence[object]) -> FieldError:
    choices = ", ".join(_show(choice) for choice in allowed)
    return FieldError(
        field,
        "FieldValueNotSupported",
        f"Unsupported value: {_show(value)}: supported values: {choices}",
    )


def forbidden_value(field: str, detail: str) -> FieldError:
    return FieldError(field, "FieldValueForbidden", f"Forbidden: {detail}")


def duplicate(field: str, value: object) -> FieldError:
    return FieldError(field, "FieldValueDuplicate", f"Duplicate value: {_show(value)}")


def _show(value: object) -> str:
    """Format a value as in the messages of kube-apiserver."""
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or isinstance(value, (dict, list)):
        return f'"{type_name(value)}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


_TYPE_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def type_name(value: object) -> str:
    """Return the JSON Schema type of a decoded value."""
    return _TYPE_NAMES.get(type(value), "null")


class ApiError(Exception):
    """An error response: an HTTP status code and the fields of a metav1.Status."""

    def __init__(
        self, code: int, reason: str, message: str, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> dict[str, Any]:
        """Return the error as a metav1.Status."""
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            body["details"] = self.details
        return body


def details(resource: Resource, name: str) -> dict[str, Any]:
    """Build the field `details` of a metav1.Status about the object `name` of `resource`."""
    group = {"group": resource.group} if resource.group else {}
    return {"name": name, "kind": resource.plural, **group}


def not_found(resource: Resource, name: str) -> ApiError:
    message = f'{resource.qualified} "{name}" not found'
    return ApiError(404, "NotFound", message, details(resource, name))


def no_such_path(path: str) -> ApiError:
    return ApiError(404, "NotFound", f"the server could not find the requested resource ({path})")


def already_exists(resource: Resource, name: str) -> ApiError:
    message = f'{resource.qualified} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, details(resource, name))


def conflict(
    resource: Resource,
    name: str,
    why: str = (
        "the object has been modified; please apply your changes "
        "to the latest version and try again"
    ),
) -> ApiError:
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", message, details(resource, name))


def apply_conflict(owned: Sequence[tuple[str, str]]) -> ApiError:
    """Build the error for a server-side apply that conflicts with other managers.

    Args:
        owned: (quoted manager, field path such as `.spec.replicas`) for each field in conflict.
    """
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {manager}", "field": field}
        for manager, field in owned
    ]
    listed = []
    for manager in dict.fromkeys(manager for manager, _ in owned):
        fields = [field for owner, field in owned if owner == manager]
        listed.append(
            f"conflict with {manager}: {fields[0]}"
            if len(fields) == 1
            else f"conflicts with {manager}:" + "".join(f"\n- {field}" for field in fields)
        )
    count = "1 conflict" if len(causes) == 1 else f"{len(causes)} conflicts"
    return ApiError(
        409, "Conflict", f"Apply failed with {count}: " + "\n".join(listed), {"causes": causes}
    )


def invalid(resource: Resource, name: str, errors: Sequence[FieldError]) -> ApiError:
    causes = [{"reason": e.reason, "message": e.message, "field": e.field} for e in errors]
    shown = {**details(resource, name), "kind": resource.kind, "causes": causes}
    listed = str(errors[0]) if len(errors) == 1 else "[" + ", ".join(map(str, errors)) + "]"
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', shown)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def forbidden(
    resource: Resource, name: str, why: str, causes: Sequence[dict[str, str]]
) -> ApiError:
    message = f'{resource.qualified} "{name}" is forbidden: {why}'
    return ApiError(403, "Forbidden", message, {**details(resource, name), "causes": list(causes)})


def method_not_allowed(what: str) -> ApiError:
    message = f"the server does not allow this method on the requested resource: {what}"
    return ApiError(405, "MethodNotAllowed", message)


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, "UnsupportedMediaType", message)


def unknown_media_type(accepted: Sequence[str]) -> ApiError:
    return unsupported_media_type(
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(accepted)
    )


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)
