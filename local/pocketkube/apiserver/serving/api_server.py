"""The HTTPS server of the Kubernetes API.

The server authenticates and parses each request (request_parsing.py), and reads or writes the
`ClusterState`. watch.py streams watches, and pod_logs.py streams logs from the kubelet.
pod_streams.py connects clients of exec, attach and port-forward with the kubelet.
resource_metrics.py serves the usage that kubelets measure.
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
from pocketkube.apiserver.objects import patches, subresources
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import (
    NODE_METRICS,
    POD_METRICS,
    Object,
    RequestInfo,
    Resource,
)
from pocketkube.apiserver.serving import api_discovery
from pocketkube.apiserver.serving.pod_logs import stream_logs
from pocketkube.apiserver.serving.pod_streams import STREAMS, stream_pod
from pocketkube.apiserver.serving.request_parsing import (
    OBJECT_TYPES,
    delete_options,
    media_type_of,
    parse_body,
    parse_path,
    parse_selectors,
    require_object,
    verb_of,
    write_options,
)
from pocketkube.apiserver.serving.resource_metrics import read_metrics
from pocketkube.apiserver.serving.selectors import required_labels
from pocketkube.apiserver.serving.tables import TablePrinter
from pocketkube.apiserver.serving.watch import Selection, watch
from pocketkube.certificates import Certificates

logger = logging.getLogger(__name__)

#: Maximum size of a request body in bytes, as in kube-apiserver.
_MAX_BODY = 3 * 1024 * 1024
_OPENAPI_V2_PROTOBUF = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


class ApiServer:
    """Serves the API of one cluster.

    Args:
        port: port to listen on; 0 for a free one. After `start()`, the attribute `port` has the
            actual port.
    """

    def __init__(
        self, cluster: ClusterState, host: str, port: int, certificates: Certificates
    ) -> None:
        self._cluster = cluster
        self._host = host
        self._certificates = certificates
        self.port = port
        self._runner: web.AppRunner | None = None
        self._kubelets: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        files = self._certificates
        # The certificates of kubelets are not verified, as by kube-apiserver's default.
        to_kubelets = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        to_kubelets.check_hostname = False
        to_kubelets.verify_mode = ssl.CERT_NONE
        to_kubelets.load_cert_chain(files.client_certificate, files.client_key)
        self._kubelets = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=to_kubelets)
        )
        # A disconnect cancels the handler, which ends a watch or a log at once. A write cannot be
        # cancelled halfway, because it has no await.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=0.5,
        )
        await self._runner.setup()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(files.certificate, files.key)
        site = web.TCPSite(self._runner, self._host, self.port, ssl_context=tls, reuse_address=True)
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
            logger.exception("%s %s failed with code 500", request.method, request.path_qs)
            return _json(
                ApiError(500, "InternalError", f"Internal error occurred: {error!r}").status(), 500
            )

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/") or "/"
        if path in ("/healthz", "/readyz", "/livez"):
            return web.Response(text="ok")
        if path == "/version":
            return _json(api_discovery.VERSION)
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        # Schemes are case-insensitive, and in-cluster clients send `bearer`.
        if kind.lower() != "bearer":
            raise errors.unauthorized()
        self._cluster.tokens.authenticate(token)
        if found := self._discovery(request):
            return found
        info = parse_path(path, self._cluster.catalog)
        if info is None:
            raise errors.no_such_path(path)
        return await self._serve(request, info)

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
                return _json(api_discovery.core_versions(f"{self._host}:{self.port}"))
            case ["api", "v1"]:
                return _json(api_discovery.resource_list(catalog, "", "v1"))
            case ["apis"]:
                return _json(api_discovery.group_list(catalog))
            case ["apis", group] if group in catalog.groups():
                return _json(api_discovery.group(catalog, group))
            case ["apis", group, version] if version in catalog.versions(group):
                return _json(api_discovery.resource_list(catalog, group, version))
            case ["openapi", "v2"]:
                if "proto-openapi" in request.headers.get("Accept", ""):
                    return web.Response(
                        body=api_discovery.openapi_v2_protobuf(), content_type=_OPENAPI_V2_PROTOBUF
                    )
                return _json(api_discovery.openapi_v2())
            case ["openapi", "v3"]:
                return _json(api_discovery.openapi_v3_index(catalog))
            case ["openapi", "v3", "api", "v1"]:
                return _json(api_discovery.openapi_v3(catalog, "", "v1"))
            case ["openapi", "v3", "apis", group, version] if version in catalog.versions(group):
                return _json(api_discovery.openapi_v3(catalog, group, version))
        return None

    async def _serve(self, request: web.Request, info: RequestInfo) -> web.StreamResponse:
        verb = verb_of(info, request)
        subresource = info.resource.subresource(info.subresource)
        offered = subresource.verbs if subresource else info.resource.verbs
        if verb not in offered:
            below = f"/{info.subresource}" if info.subresource else ""
            raise errors.method_not_allowed(
                f"{info.resource.qualified}{below} offers {', '.join(offered)}, not {verb}"
            )
        assert self._kubelets is not None, "requests come after start()"
        if info.resource in (NODE_METRICS, POD_METRICS):
            registry = self._cluster.registry
            return _json(await read_metrics(info, request.query, registry, self._kubelets))
        if info.subresource in ("log", *STREAMS):
            serve = stream_logs if info.subresource == "log" else stream_pod
            return await serve(request, info, self._cluster.registry, self._kubelets)
        if verb in ("list", "watch"):
            return await self._read_many(request, info, verb)
        if verb == "deletecollection":
            return await self._delete_collection(request, info)
        if verb == "delete":
            return await self._delete(request, info)
        if verb == "get":
            is_scale = info.subresource == "scale"
            reader = self._cluster.scale if is_scale else self._cluster.registry
            return self._respond(request, info, reader.get(info))
        options = write_options(info, request)
        media_type = media_type_of(request)
        accepted = patches.media_types(info.resource) if verb == "patch" else OBJECT_TYPES
        body = parse_body(await request.read(), media_type, accepted)
        if media_type != "application/json-patch+json":
            body = require_object(body)
        result, code = self._write(request, info, verb, body, options)
        response = self._respond(request, info, result, code)
        for warning in options.warnings:
            response.headers.add("Warning", f"299 - {json.dumps(warning)}")
        return response

    def _write(
        self, request: web.Request, info: RequestInfo, verb: str, body: Any, options: WriteOptions
    ) -> tuple[Object, int]:
        cluster = self._cluster
        match info.subresource, verb:
            case "", "create":
                return cluster.registry.create(info, body, options), 201
            case "token", "create":
                return cluster.tokens.request(info, body), 201
            case "binding", "create":
                return subresources.bind(cluster.registry, info, body, options), 201
            case "scale", "update":
                return cluster.scale.update(info, body, options), 200
            case "scale", "patch":
                return cluster.scale.patch(info, request.content_type, body, options), 200
            case _, "update":
                return cluster.registry.update(info, body, options), 200
        storage = info.resource.storage_key
        existed = cluster.store.get(storage, info.namespace, info.name) is not None
        result = cluster.registry.patch(info, request.content_type, body, options)
        return result, 200 if existed else 201

    def _printer(self, request: web.Request, resource: Resource) -> TablePrinter | None:
        """Return a printer for `resource` if the client prefers a table, else None."""
        first = request.headers.get("Accept", "").partition(",")[0].replace(" ", "")
        if "as=Table" not in first:
            return None
        custom = self._cluster.catalog.custom(resource)
        return TablePrinter(resource, custom.columns if custom else ())

    def _respond(
        self, request: web.Request, info: RequestInfo, obj: Object, code: int = 200
    ) -> web.Response:
        if not info.subresource and (printer := self._printer(request, info.resource)):
            version = {"resourceVersion": obj["metadata"].get("resourceVersion", "")}
            return _json(
                printer.table([obj], version, request.query.get("includeObject", "Metadata")), code
            )
        return _json(obj, code)

    async def _read_many(
        self, request: web.Request, info: RequestInfo, verb: str
    ) -> web.StreamResponse:
        matches = parse_selectors(info, request.query)
        printer = self._printer(request, info.resource)
        include = request.query.get("includeObject", "Metadata")
        if verb == "watch":
            chosen = Selection(info.resource, info.namespace, matches, printer, include)
            return await watch(request, self._cluster, chosen)
        store, registry = self._cluster.store, self._cluster.registry
        labels = required_labels(request.query.get("labelSelector", ""))
        stored = store.list(info.resource.storage_key, info.namespace, matches, labels)
        objects = [registry.view(info.resource, obj) for obj in stored]
        objects, metadata = _page(objects, request.query, str(store.version))
        if printer:
            return _json(printer.table(objects, metadata, include))
        if not info.resource.custom:
            objects = [
                {key: value for key, value in obj.items() if key not in ("apiVersion", "kind")}
                for obj in objects
            ]
        return _list(info.resource, metadata, objects)

    async def _delete(self, request: web.Request, info: RequestInfo) -> web.Response:
        options = await delete_options(request)
        obj, gone = self._cluster.deletion.delete(info, options)
        if not gone or info.resource.kind == "Pod":
            return self._respond(request, info, self._cluster.registry.view(info.resource, obj))
        details = errors.details(info.resource, info.name)
        return _json(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Success",
                "details": {**details, "uid": obj["metadata"]["uid"]},
            }
        )

    async def _delete_collection(self, request: web.Request, info: RequestInfo) -> web.Response:
        options = replace(await delete_options(request), uid="", resource_version="")
        matches = parse_selectors(info, request.query)
        cluster, resource = self._cluster, info.resource
        deleted = []
        for obj in cluster.store.list(resource.storage_key, info.namespace):
            if matches(obj):
                metadata = obj["metadata"]
                each = RequestInfo(resource, metadata.get("namespace", ""), metadata["name"])
                last, _ = cluster.deletion.delete(each, options)
                deleted.append(cluster.registry.view(resource, last))
        return _list(resource, {"resourceVersion": str(cluster.store.version)}, deleted)


def _page(objects: Sequence[Object], query: Any, version: str) -> tuple[list[Object], Object]:
    """Return one page of a list, and the metadata of the list.

    The query parameters `limit` and `continue` select the page. The continue token in the metadata
    names the last object of this page. The token also has the resource version of the first page.
    """
    metadata: Object = {"resourceVersion": version}
    try:
        limit = int(query.get("limit") or 0)
    except ValueError as error:
        raise errors.bad_request(f"limit: {query['limit']!r} is not a number") from error
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
