"""Build the discovery and OpenAPI documents for kubectl from the catalog."""

from __future__ import annotations

import hashlib
import json

from pocketkube.apiserver.resources import Object, Resource
from pocketkube.apiserver.schema.catalog import Catalog

VERSION: Object = {
    "major": "1",
    "minor": "32",
    "gitVersion": "v1.32.0+pocketkube",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "CPython",
    "platform": "linux/amd64",
}


def core_versions(address: str) -> Object:
    server = {"clientCIDR": "0.0.0.0/0", "serverAddress": address}
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [server]}


def group(catalog: Catalog, name: str) -> Object:
    versions = [
        {"groupVersion": f"{name}/{version}", "version": version}
        for version in catalog.versions(name)
    ]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": name,
        "versions": versions,
        "preferredVersion": versions[0],
    }


def group_list(catalog: Catalog) -> Object:
    groups = [group(catalog, name) for name in catalog.groups()]
    for entry in groups:
        del entry["kind"], entry["apiVersion"]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def resource_list(catalog: Catalog, group_name: str, version: str) -> Object:
    resources = [
        entry
        for resource in catalog
        if (resource.group, resource.version) == (group_name, version)
        for entry in _entries(resource)
    ]
    group_version = f"{group_name}/{version}" if group_name else version
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": resources,
    }


def _entries(resource: Resource) -> list[Object]:
    entry: Object = {
        "name": resource.plural,
        "singularName": resource.singular_name,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    entries = [entry]
    for sub in resource.subresources:
        below: Object = {
            "name": f"{resource.plural}/{sub.name}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": sub.kind or resource.kind,
            "verbs": list(sub.verbs),
        }
        if sub.version:
            below |= {"group": sub.group, "version": sub.version}
        entries.append(below)
    return entries


def openapi_v3_index(catalog: Catalog) -> Object:
    paths: Object = {}
    for resource in catalog:
        path = f"apis/{resource.api_version}" if resource.group else f"api/{resource.version}"
        if path not in paths:
            document = openapi_v3(catalog, resource.group, resource.version)
            digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
            paths[path] = {"serverRelativeURL": f"/openapi/v3/{path}?hash={digest.upper()[:32]}"}
    return {"paths": paths}


def openapi_v3(catalog: Catalog, group_name: str, version: str) -> Object:
    """Build the OpenAPI v3 document of one API version.

    The document has the paths with their query parameters, and the schemas of custom resources.
    From the parameters, kubectl detects that the server validates fields and supports dry runs.
    The schema of a built-in kind is only `type: object`, because clients have their own schemas.
    """
    paths: Object = {}
    schemas: Object = {}
    for resource in catalog:
        is_of_version = (resource.group, resource.version) == (group_name, version)
        # kubectl reads the parameters of writes here, so kinds without writes are left out.
        if not is_of_version or "create" not in resource.verbs:
            continue
        base = f"/apis/{resource.api_version}" if resource.group else f"/api/{resource.version}"
        below = "/namespaces/{namespace}" if resource.namespaced else ""
        collection = f"{base}{below}/{resource.plural}"
        gvk = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        custom = catalog.custom(resource)
        reversed_group = ".".join(reversed((resource.group or "core").split(".")))
        name = f"{reversed_group}.{resource.version}.{resource.kind}"
        schema = dict(custom.schema.schema) if custom else {"type": "object"}
        schemas[name] = {**schema, "x-kubernetes-group-version-kind": [gvk]}
        paths[collection] = {"post": _operation("post", gvk), "get": _operation("list", gvk)}
        paths[f"{collection}/{{name}}"] = {
            verb: _operation(verb, gvk) for verb in ("get", "put", "patch", "delete")
        }
    return {
        "openapi": "3.0.0",
        "info": {"title": "pocketkube", "version": VERSION["gitVersion"]},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(action: str, gvk: Object) -> Object:
    writing = ("dryRun", "fieldManager", "fieldValidation")
    names = {"post": writing, "put": writing, "patch": (*writing, "force"), "delete": writing[:1]}
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
        for name in names.get(action, ())
    ]
    return {
        "parameters": parameters,
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": gvk,
    }


def openapi_v2() -> Object:
    info = {"title": "pocketkube", "version": VERSION["gitVersion"]}
    return {"swagger": "2.0", "info": info, "paths": {}, "definitions": {}}


def openapi_v2_protobuf() -> bytes:
    """Encode the OpenAPI v2 document as protobuf, for client-go.

    The message is gnostic's openapi.v2.Document. Its fields and field numbers are
    {swagger = 1, info = 2 {title = 1, version = 2}}.
    """

    def text(number: int, value: bytes) -> bytes:
        assert len(value) < 128, "longer fields need a longer length prefix"
        return bytes([number << 3 | 2, len(value)]) + value

    document = openapi_v2()
    info = text(1, document["info"]["title"].encode()) + text(
        2, document["info"]["version"].encode()
    )
    return text(1, document["swagger"].encode()) + text(2, info)
