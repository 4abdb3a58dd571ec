"""Decode the object in a request body, and check that it fits the URL of the request."""

from __future__ import annotations

from typing import Any

from pocketkube.apiserver import errors
from pocketkube.apiserver.resources import Object, RequestInfo, Resource
from pocketkube.apiserver.schema import decoding, defaults
from pocketkube.apiserver.schema.catalog import Catalog


def decode_body(
    catalog: Catalog, info: RequestInfo, obj: Any, *, require_type: bool, strict: bool
) -> tuple[Object, list[str]]:
    """Check the type and the namespace of `obj`, and remove its unknown fields.

    The returned object has the type and the namespace of the request. Defaults are not set yet. The
    metadata of the object is a copy, but its other fields may share values with `obj`.

    Args:
        require_type: refuse an object that lacks apiVersion or kind. Custom resources always need
            both.
        strict: refuse unknown fields instead of removing them.

    Returns:
        The object to store, and the paths of the removed fields.

    Raises:
        ApiError: 400 or 422, the API version, kind or namespace of the object differs from that of
            the request, or a field is refused.
    """
    resource = info.resource
    _check_type(resource, obj, require_type or resource.custom)
    obj = {
        **obj,
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": obj.get("metadata") or {},
    }
    new, unknown = _known_fields(catalog, resource, obj)
    if unknown and strict:
        listed = ", ".join(f'unknown field "{path}"' for path in unknown)
        raise _not_decoded(resource, f"strict decoding error: {listed}")
    if not resource.namespaced:
        new["metadata"].pop("namespace", None)
    elif new["metadata"].setdefault("namespace", info.namespace) != info.namespace:
        raise errors.bad_request(
            "the namespace of the provided object does not match "
            "the namespace sent on the request: "
            f"{new['metadata']['namespace']} is not {info.namespace}"
        )
    if resource.storage_key == "events" and resource.group:
        new = defaults.event_to_core(new)
    return new, unknown


def _known_fields(catalog: Catalog, resource: Resource, obj: Object) -> tuple[Object, list[str]]:
    """Return the object without unknown fields, and the paths of the unknown fields."""
    try:
        if custom := catalog.custom(resource):
            pruned, unknown = custom.schema.prune(obj)
            metadata, more = decoding.decode("meta", "v1", "ObjectMeta", pruned["metadata"])
            unknown += [f"metadata.{path}" for path in more]
            return {**pruned, "metadata": metadata}, unknown
        return decoding.decode(resource.group, resource.version, resource.kind, obj)
    except decoding.DecodeError as error:
        raise _not_decoded(resource, str(error)) from error


def _not_decoded(resource: Resource, why: str) -> errors.ApiError:
    kind = resource.kind
    return errors.bad_request(
        f'{kind} in version "{resource.version}" cannot be handled as a {kind}: {why}'
    )


def _check_type(resource: Resource, obj: Object, required: bool) -> None:
    """Check that apiVersion and kind fit `resource`. Both may be missing unless `required`."""
    version, kind = obj.get("apiVersion"), obj.get("kind")
    if version != resource.api_version and (version or required):
        raise errors.bad_request(
            f"the API version in the data ({version}) does not match the expected API version "
            f"({resource.api_version})"
        )
    if kind != resource.kind and (kind or required):
        if not resource.custom:
            raise errors.bad_request(
                f"the kind in the data ({kind}) does not match the expected kind ({resource.kind})"
            )
        name = (obj.get("metadata") or {}).get("name", "")
        raise errors.invalid(
            resource, name, [errors.invalid_value("kind", kind, f"must be {resource.kind}")]
        )
