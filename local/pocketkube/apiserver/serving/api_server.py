"""The HTTPS server of the Kubernetes API.

It authenticates a request, parses it into a `Call` (request.py) and calls the cluster. watch.py
streams watches, and pod_logs.py streams logs from the kubelet.
"""

from __future__ import annotations

import base64
import json
import logging
import ssl
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from pocketkube.apiserver import errors
from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects import subresources
from pocketkube.apiserver.objects.deletion import DeleteOptions
from pocketkube.apiserver.resources import VERBS, Object, Resource
from pocketkube.apiserver.serving import discovery
from pocketkube.apiserver.serving.pod_logs import stream_logs
from pocketkube.apiserver.serving.request import (
    Call,
    parse_body,
    parse_path,
    require_object,
    selection,
)
from pocketkube.apiserver.serving.selectors import required_labels
from pocketkube.apiserver.serving.tables import TablePrinter
from pocketkube.apiserver.serving.watch import Selection, watch

logger = logging.getLogger(__name__)

#: The limit of kube-apiserver.
_MAX_BODY = 3 * 1024 * 1024
_OPENAPI_V2_PROTOBUF = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"


class ApiServer:
    """Serves one cluster on one address. `port` is known after `start()`; 0 asks for a free one."""

    def __init__(self, cluster: ClusterState, host: str, port: int, tls: ssl.SSLContext) -> None:
        self._cluster = cluster
        self._host = host
        self._tls = tls
        self.port = port
        self._runner: web.AppRunner | None = None
        self._kubelets: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._kubelets = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        # A disconnect cancels the handler, which ends a watch or a log at once. A write has no
        # await at which it could be cancelled half done.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=0.5,
        )
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, self._host, self.port, ssl_context=self._tls, reuse_address=True
        )
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
        if self._kubelets:
            await self._kubelets.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._dispatch(request)
        except ApiError as error:
            return _json(error.status(), error.code)
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path_qs)
            return _json(
                ApiError(500, "InternalError", f"Internal error occurred: {error!r}").status(), 500
            )

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/") or "/"
        if path in ("/healthz", "/readyz", "/livez"):
            return web.Response(text="ok")
        if path == "/version":
            return _json(discovery.VERSION)
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        # Schemes are case-insensitive, and in-cluster clients send `bearer`.
        if kind.lower() != "bearer":
            raise errors.unauthorized()
        self._cluster.tokens.user(token)
        if found := self._discovery(request):
            return found
        call = parse_path(path, self._cluster.catalog)
        if call is None:
            raise errors.no_such_path(path)
        return await self._serve(request, call)

    def _discovery(self, request: web.Request) -> web.Response | None:
        catalog = self._cluster.catalog
        parts = [part for part in request.path.split("/") if part]
        match parts:
            case []:
                return _json(
                    {
                        "paths": [
                            "/api",
                            "/apis",
                            "/healthz",
                            "/openapi/v2",
                            "/openapi/v3",
                            "/version",
                        ]
                    }
                )
            case ["api"]:
                return _json(discovery.core_versions(f"{self._host}:{self.port}"))
            case ["api", "v1"]:
                return _json(discovery.resource_list(catalog, "", "v1"))
            case ["apis"]:
                return _json(discovery.group_list(catalog))
            case ["apis", group] if group in catalog.groups():
                return _json(discovery.group(catalog, group))
            case ["apis", group, version] if version in catalog.versions(group):
                return _json(discovery.resource_list(catalog, group, version))
            case ["openapi", "v2"]:
                if "proto-openapi" in request.headers.get("Accept", ""):
                    return web.Response(
                        body=discovery.openapi_v2_protobuf(), content_type=_OPENAPI_V2_PROTOBUF
                    )
                return _json(discovery.openapi_v2())
            case ["openapi", "v3"]:
                return _json(discovery.openapi_v3_index(catalog))
            case ["openapi", "v3", "api", "v1"]:
                return _json(discovery.openapi_v3(catalog, "", "v1"))
            case ["openapi", "v3", "apis", group, version] if version in catalog.versions(group):
                return _json(discovery.openapi_v3(catalog, group, version))
        return None

    async def _serve(self, request: web.Request, call: Call) -> web.StreamResponse:
        verb = call.verb(request.method, request.query)
        offered = call.subresource.verbs if call.subresource else VERBS
        if verb not in offered:
            below = f"/{call.subresource.name}" if call.subresource else ""
            raise errors.method_not_allowed(
                f"{call.resource.qualified}{below} offers {', '.join(offered)}, not {verb}"
            )
        if call.subresource and call.subresource.name == "log":
            assert self._kubelets is not None, "requests come after start()"
            return await stream_logs(
                request, self._cluster.registry, self._kubelets, call.namespace, call.name
            )
        if verb in ("list", "watch"):
            return await self._read_many(request, call, verb)
        if verb == "deletecollection":
            return await self._delete_collection(request, call)
        if verb == "delete":
            return await self._delete(request, call)
        if verb == "get":
            return self._respond(request, call, self._read_one(call))
        options = call.write_options(request)
        body = parse_body(await request.read(), request.content_type)
        if request.content_type != "application/json-patch+json":
            body = require_object(body)
        result, code = self._write(request, call, verb, body, options)
        response = self._respond(request, call, result, code)
        for warning in options.warnings:
            response.headers.add("Warning", f"299 - {json.dumps(warning)}")
        return response

    def _read_one(self, call: Call) -> Object:
        cluster = self._cluster
        if call.subresource and call.subresource.name == "scale":
            return cluster.scale.get(call.resource, call.namespace, call.name)
        return cluster.registry.get(call.resource, call.namespace, call.name)

    def _write(
        self, request: web.Request, call: Call, verb: str, body: Any, options: Any
    ) -> tuple[Object, int]:
        cluster, resource = self._cluster, call.resource
        target = (resource, call.namespace, call.name)
        sub = call.subresource.name if call.subresource else ""
        match sub, verb:
            case "", "create":
                return cluster.registry.create(resource, call.namespace, body, options), 201
            case "token", "create":
                return cluster.tokens.request(resource, call.namespace, call.name, body), 201
            case "binding", "create":
                return subresources.bind(cluster.registry, *target, body, options), 201
            case "scale", "update":
                return cluster.scale.update(*target, body, options), 200
            case "scale", "patch":
                return cluster.scale.patch(*target, request.content_type, body, options), 200
            case _, "update":
                return cluster.registry.update(*target, body, options, sub), 200
        existed = cluster.store.get(resource.storage_key, call.namespace, call.name) is not None
        result = cluster.registry.patch(*target, request.content_type, body, options, sub)
        return result, 200 if existed else 201

    def _printer(self, request: web.Request, resource: Resource) -> TablePrinter | None:
        """Return a printer if the client prefers a table."""
        first = request.headers.get("Accept", "").partition(",")[0].replace(" ", "")
        if "as=Table" not in first:
            return None
        custom = self._cluster.catalog.custom(resource)
        return TablePrinter(resource, custom.columns if custom else ())

    def _respond(
        self, request: web.Request, call: Call, obj: Object, code: int = 200
    ) -> web.Response:
        if call.subresource is None and (printer := self._printer(request, call.resource)):
            version = {"resourceVersion": obj["metadata"].get("resourceVersion", "")}
            return _json(
                printer.table([obj], version, request.query.get("includeObject", "Metadata")), code
            )
        return _json(obj, code)

    async def _read_many(self, request: web.Request, call: Call, verb: str) -> web.StreamResponse:
        matches = selection(call, request.query)
        printer = self._printer(request, call.resource)
        include = request.query.get("includeObject", "Metadata")
        if verb == "watch":
            chosen = Selection(call.resource, call.namespace, matches, printer, include)
            return await watch(request, self._cluster, chosen)
        store, registry = self._cluster.store, self._cluster.registry
        labels = required_labels(request.query.get("labelSelector", ""))
        stored = store.list(call.resource.storage_key, call.namespace, matches, labels)
        objects = [registry.view(call.resource, obj) for obj in stored]
        objects, metadata = _page(objects, request.query, str(store.version))
        if printer:
            return _json(printer.table(objects, metadata, include))
        if not call.resource.custom:
            objects = [
                {key: value for key, value in obj.items() if key not in ("apiVersion", "kind")}
                for obj in objects
            ]
        return _list(call.resource, metadata, objects)

    async def _delete(self, request: web.Request, call: Call) -> web.Response:
        options = await self._delete_options(request)
        obj, gone = self._cluster.deletion.delete(call.resource, call.namespace, call.name, options)
        if not gone or call.resource.kind == "Pod":
            return self._respond(request, call, self._cluster.registry.view(call.resource, obj))
        details = errors.details(call.resource, call.name)
        return _json(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Success",
                "details": {**details, "uid": obj["metadata"]["uid"]},
            }
        )

    async def _delete_collection(self, request: web.Request, call: Call) -> web.Response:
        options = replace(await self._delete_options(request), uid="", resource_version="")
        matches = selection(call, request.query)
        cluster, resource = self._cluster, call.resource
        deleted = []
        for obj in cluster.store.list(resource.storage_key, call.namespace):
            if matches(obj):
                metadata = obj["metadata"]
                last, _ = cluster.deletion.delete(
                    resource, metadata.get("namespace", ""), metadata["name"], options
                )
                deleted.append(cluster.registry.view(resource, last))
        return _list(resource, {"resourceVersion": str(cluster.store.version)}, deleted)

    @staticmethod
    async def _delete_options(request: web.Request) -> DeleteOptions:
        raw = await request.read()
        body = parse_body(raw, request.content_type) if raw else {}
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
                f"gracePeriodSeconds: {grace!r} is no number of seconds"
            ) from error
        return DeleteOptions(
            grace_period_s=grace_s,
            propagation=propagation or "Background",
            uid=wanted.get("uid", ""),
            resource_version=wanted.get("resourceVersion", ""),
            dry_run=bool(body.get("dryRun") or query.get("dryRun")),
        )


def _page(objects: Sequence[Object], query: Any, version: str) -> tuple[list[Object], Object]:
    """Cut one page out of a list.

    The continue token holds the last object of the page and the version of the first page.
    """
    metadata: Object = {"resourceVersion": version}
    try:
        limit = int(query.get("limit") or 0)
    except ValueError as error:
        raise errors.bad_request(f"limit: {query['limit']!r} is no number") from error
    rest = list(objects)
    if token := query.get("continue"):
        try:
            start = json.loads(base64.urlsafe_b64decode(token))
            metadata["resourceVersion"] = start["version"]
            last = tuple(start["last"])
        except (ValueError, KeyError, TypeError) as error:
            raise errors.bad_request("continue key is not valid; list again without it") from error
        rest = [obj for obj in rest if _position(obj) > last]
    if limit and len(rest) > limit:
        page = rest[:limit]
        token = json.dumps({"version": metadata["resourceVersion"], "last": _position(page[-1])})
        metadata["continue"] = base64.urlsafe_b64encode(token.encode()).decode()
        metadata["remainingItemCount"] = len(rest) - limit
        return page, metadata
    return rest, metadata


def _position(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _list(resource: Resource, metadata: Object, items: list[Object]) -> web.Response:
    return _json(
        {
            "kind": resource.list_kind_name,
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": items,
        }
    )


def _json(body: Object, code: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=code, content_type="application/json"
    )
