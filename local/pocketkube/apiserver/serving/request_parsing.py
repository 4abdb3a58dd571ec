"""Parse requests: path, verb, body and query parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import yaml
from aiohttp import web

from pocketkube.apiserver import errors
from pocketkube.apiserver.objects.deletion import DeleteOptions
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import Object, RequestInfo
from pocketkube.apiserver.schema.catalog import Catalog
from pocketkube.apiserver.serving import selectors

#: Media types of objects in request bodies.
OBJECT_TYPES = ("application/json", "application/yaml")
#: Maximum number of nested levels of YAML in a request body.
MAX_YAML_DEPTH = 500


def verb_of(info: RequestInfo, request: web.Request) -> str:
    """Return the Kubernetes verb of a request, such as `list` or `deletecollection`."""
    match request.method:
        case "GET" if is_set(request.query, "watch") and not info.subresource:
            return "watch"
        case "GET":
            return "get" if info.name else "list"
        case "POST" if not info.name or info.subresource:
            return "create"
        case "PUT" if info.name:
            return "update"
        case "PATCH" if info.name:
            return "patch"
        case "DELETE":
            return "delete" if info.name else "deletecollection"
    return request.method.lower()


def write_options(info: RequestInfo, request: web.Request) -> WriteOptions:
    """Return the options in the query parameters of a write.

    Raises:
        ApiError: 400 or 422, an option is invalid.
    """
    query = request.query
    applying = request.method == "PATCH" and request.content_type == "application/apply-patch+yaml"
    manager = query.get("fieldManager", "")
    if applying and not manager:
        missing = errors.required("fieldManager", "is required for apply patch")
        raise errors.invalid(info.resource, info.name, [missing])
    force = is_set(query, "force")
    if force and not applying:
        refused = errors.forbidden_value("force", "may not be specified for non-apply patch")
        raise errors.invalid(info.resource, info.name, [refused])
    dry_run = query.getall("dryRun", [])
    if any(value != "All" for value in dry_run):
        raise errors.bad_request(f"dryRun: {dry_run[0]!r}: the only supported value is All")
    checking = query.get("fieldValidation") or "Warn"
    if checking not in ("Ignore", "Warn", "Strict"):
        raise errors.bad_request(f"fieldValidation: {checking!r}: use Ignore, Warn or Strict")
    agent = request.headers.get("User-Agent", "").partition("/")[0]
    return WriteOptions(
        manager or agent or "unknown",
        dry_run=bool(dry_run),
        field_validation=checking,
        force=force,
    )


async def delete_options(request: web.Request) -> DeleteOptions:
    """Return the options in the body and the query parameters of a DELETE.

    Raises:
        ApiError: 400, the body or an option is invalid.
    """
    raw = await request.read()
    body = parse_body(raw, media_type_of(request)) if raw else {}
    if not isinstance(body, dict):
        raise errors.bad_request("the body of a DELETE is a DeleteOptions object")
    query = request.query
    grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    propagation = body.get("propagationPolicy") or query.get("propagationPolicy")
    if body.get("orphanDependents"):
        propagation = "Orphan"
    if propagation not in (None, "Background", "Foreground", "Orphan"):
        raise errors.bad_request(
            f"propagationPolicy {propagation!r}: use Background, Foreground or Orphan"
        )
    wanted = body.get("preconditions") or {}
    try:
        grace_s = None if grace is None else int(grace)
    except (TypeError, ValueError) as error:
        raise errors.bad_request(
            f"gracePeriodSeconds: {grace!r} is not a number of seconds"
        ) from error
    return DeleteOptions(
        grace_period_s=grace_s,
        propagation=propagation or "Background",
        uid=wanted.get("uid", ""),
        resource_version=wanted.get("resourceVersion", ""),
        dry_run=bool(body.get("dryRun") or query.get("dryRun")),
    )


def is_set(query: Mapping[str, str], name: str) -> bool:
    """Return whether the query parameter `name` is `1` or `true`."""
    return query.get(name, "").lower() in ("1", "true")


def parse_path(path: str, catalog: Catalog) -> RequestInfo | None:
    """Return the target of a path such as `/api/v1/namespaces/x/pods/y/log`; None if not served."""
    match [part for part in path.split("/") if part]:
        case ["api", "v1", *rest]:
            group, version = "", "v1"
        case ["apis", group, version, *rest]:
            pass
        case _:
            return None
    namespace = ""
    # `namespaces/x/pods` is a collection in a namespace. `namespaces/x` and `namespaces/x/status`
    # are the namespace itself.
    if (
        len(rest) > 2
        and rest[0] == "namespaces"
        and not (len(rest) == 3 and rest[2] in ("status", "finalize"))
    ):
        namespace, rest = rest[1], rest[2:]
    resource = catalog.find(group, version, rest[0]) if rest else None
    if resource is None or len(rest) > 3 or bool(namespace) > resource.namespaced:
        return None
    name = rest[1] if len(rest) > 1 else ""
    if resource.namespaced and name and not namespace:
        return None
    subresource = rest[2] if len(rest) > 2 else ""
    if subresource and resource.subresource(subresource) is None:
        return None
    return RequestInfo(resource, namespace, name, subresource)


def parse_selectors(info: RequestInfo, query: Mapping[str, str]) -> selectors.Predicate:
    """Return a predicate that is True for objects that match the selectors in `query`.

    If `info` has a name, the objects must also have this name.
    """
    by_label = selectors.label_selector(query.get("labelSelector", ""))
    by_field = selectors.field_selector(query.get("fieldSelector", ""), info.resource.storage_key)
    name = info.name
    return lambda obj: (
        by_label(obj) and by_field(obj) and (not name or obj["metadata"]["name"] == name)
    )


def require_object(body: Any) -> Object:
    """Return `body` if it is an object whose metadata is an object or missing.

    Raises:
        ApiError: 400, the body or its metadata is not an object.
    """
    if not isinstance(body, dict):
        raise errors.bad_request(
            f"the request's body must be an object, not {errors.type_name(body)}"
        )
    metadata = body.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise errors.bad_request(f"metadata: expected an object, got {errors.type_name(metadata)}")
    return body


class _Loader(yaml.CSafeLoader):
    """Loads YAML as Kubernetes does: timestamps remain strings."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def _check_yaml(raw: bytes) -> None:
    """Raise ValueError if the YAML in `raw` is nested too deeply or has aliases.

    The loader of libyaml recurses without a limit, so deep nesting would overflow the stack.
    Aliases of aliases could take all memory. kubectl still accepts files with aliases, because it
    converts YAML to JSON before it sends the request.
    """
    depth = 0
    for event in yaml.parse(raw, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias; write the value instead")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise ValueError(f"it has more than {MAX_YAML_DEPTH} nested levels")


def media_type_of(request: web.Request) -> str:
    """Return the media type of the body: JSON if the request names none, as in Kubernetes."""
    return request.content_type if "Content-Type" in request.headers else "application/json"


def parse_body(raw: bytes, media_type: str, accepted: Sequence[str] = OBJECT_TYPES) -> Any:
    """Decode a request body as JSON or, if the media type is YAML, as YAML.

    Raises:
        ApiError: 400 for a malformed body, 415 for a media type that is not accepted.
    """
    if media_type.endswith("protobuf"):
        raise errors.unsupported_media_type(
            "this control plane accepts JSON, not protobuf, which `kubectl create` sends: use "
            "`kubectl apply -f FILE`, or "
            "`kubectl create ... --dry-run=client -o yaml | kubectl apply -f -`"
        )
    if media_type not in accepted:
        raise errors.unknown_media_type(accepted)
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        if "yaml" not in media_type:
            raise errors.bad_request(f"the request's body is not JSON: {error}") from error
    try:
        _check_yaml(raw)
        # The result must be JSON, because responses with the object are.
        return msgspec.json.decode(msgspec.json.encode(yaml.load(raw, Loader=_Loader)))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise errors.bad_request(f"the request's body is not YAML: {error}") from error
