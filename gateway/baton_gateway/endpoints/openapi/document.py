"""`GET /openapi.json`: the OpenAPI 3.1 document of the clients' port, made from the schemas."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import hdrs, web

from baton_gateway.access.api_keys import OPEN_PATHS
from baton_gateway.endpoints.generation_endpoint import DATA_PARALLEL_RANK
from baton_gateway.endpoints.openapi.operations import (
    FAILURES,
    OPERATIONS,
    OpenAPIOperation,
    Struct,
)
from baton_gateway.endpoints.openapi.schemas import make_schemas, reference
from baton_gateway.endpoints.writers.generation_api import GenerationWriter
from baton_gateway.errors import MESSAGES_PATH, RESPONSES_PATH
from baton_gateway.http.request_id import REQUEST_ID_HEADER
from baton_gateway.http.slow_clients import send_json
from baton_text.responses import anthropic, openai, responses_api

#: Statuses of errors that every path may have. If clients need API keys, every path that is not in
#: OPEN_PATHS also has 401.
_COMMON_ERRORS = (400, 500)


class OpenAPIEndpoint:
    """The endpoint `/openapi.json`.

    Args:
        needs_key: whether clients need an API key.
        client_timeout_s: longest time for a client to read the response.
    """

    def __init__(self, *, needs_key: bool, client_timeout_s: float) -> None:
        self._needs_key = needs_key
        self._client_timeout_s = client_timeout_s
        self._document = b""
        self._lock = asyncio.Lock()

    def route(self) -> web.RouteDef:
        return web.get("/openapi.json", self.get)

    async def get(self, http: web.Request) -> web.StreamResponse:
        async with self._lock:
            if not self._document:  # made by the first request, because few clients ask for it
                document = await asyncio.to_thread(make_document, needs_key=self._needs_key)
                self._document = msgspec.json.encode(document)
        return await send_json(http, self._document, self._client_timeout_s)


def make_document(*, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        needs_key: whether clients need an API key.
    """
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        methods = paths.setdefault(path, {})
        methods[method.lower()] = _operation(method, path, operation, needs_key=needs_key)
        if names := re.findall(r"\{(\w+)\}", path):
            methods["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "description": "OpenAI's HTTP API with fields of vLLM, and Anthropic's /v1/messages. "
            "Other paths get 404 with the code `unknown_url`. Other methods get 405 with the code "
            "`method_not_allowed`. Both have the body ErrorBody.",
            "version": importlib.metadata.version("baton"),
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": make_schemas(),
            "responses": _error_responses(),
            "headers": _HEADERS,
            "parameters": _PARAMETERS,
        },
    }
    if needs_key:
        document["components"]["securitySchemes"] = _SECURITY_SCHEMES
        document["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    return document


_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_HEADERS = {
    REQUEST_ID_HEADER: {
        "description": "Id of the request in the gateway's log.",
        "required": True,
        "schema": {"type": "string"},
    },
    hdrs.RETRY_AFTER: {
        "description": "Seconds after which to send the request again.",
        "required": True,
        "schema": {"type": "integer"},
    },
    hdrs.WWW_AUTHENTICATE: {"required": True, "schema": {"const": "Bearer"}},
}
_PARAMETERS = {
    REQUEST_ID_HEADER: {
        "name": REQUEST_ID_HEADER,
        "in": "header",
        "description": "Id of the request in the gateway's log. A value with other characters, or "
        "with more than 128, is replaced.",
        "schema": {"type": "string"},
    },
    DATA_PARALLEL_RANK: {
        "name": DATA_PARALLEL_RANK,
        "in": "header",
        "description": "The rank that serves the request, as `data_parallel_rank` of the body.",
        "schema": {"type": "integer", "minimum": 0},
    },
}


def _operation(
    method: str, path: str, operation: OpenAPIOperation, *, needs_key: bool
) -> dict[str, Any]:
    is_open = path in OPEN_PATHS
    errors = {*_COMMON_ERRORS, *operation.errors, *([401] if needs_key and not is_open else [])}
    shape = _error_shape(path)
    parameters = [REQUEST_ID_HEADER, *([DATA_PARALLEL_RANK] if operation.events else [])]
    result: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.summary,
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in parameters],
        "responses": {
            "200": _success(path, operation),
            **{
                str(status): {"$ref": f"#/components/responses/{shape.__name__}{status}"}
                for status in sorted(errors)
            },
        },
    }
    if operation.body is not None:
        content = {"schema": reference(operation.body), "example": operation.example}
        result["requestBody"] = {"required": True, "content": {"application/json": content}}
    if needs_key and is_open:
        result["security"] = []
    return result


def _success(path: str, operation: OpenAPIOperation) -> dict[str, Any]:
    """Return the OpenAPI description of the operation's response with status 200."""
    result: dict[str, Any] = {
        "description": "The response.",
        "headers": _header_refs([REQUEST_ID_HEADER]),
    }
    if operation.response is not None:
        result["content"] = {"application/json": {"schema": reference(operation.response)}}
    elif path == "/":
        result["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif path == "/openapi.json":
        result["content"] = {"application/json": {"schema": {"type": "object"}}}
    if operation.events:
        result["content"]["text/event-stream"] = {"schema": _event(path, operation)}
        result["description"] = (
            "The response, or server-sent events if the request has `stream`. Their schema is "
            "that of one event."
        )
    return result


def _event(path: str, operation: OpenAPIOperation) -> dict[str, Any]:
    """Return the schema of a server-sent event of the operation's stream."""
    failure = responses_api.ResponseError if path == RESPONSES_PATH else _error_shape(path)
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(kind) for kind in (*operation.events, failure)]},
    }
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    if path in (RESPONSES_PATH, MESSAGES_PATH):
        return event
    data = {"const": GenerationWriter.LAST_EVENT.decode()}
    last = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"anyOf": [last, event]}


def _error_shape(path: str) -> Struct:
    return anthropic.MessageError if path.startswith(MESSAGES_PATH) else openai.ErrorBody


def _error_responses() -> dict[str, Any]:
    """Return the OpenAPI descriptions of error responses, in OpenAI's and Anthropic's shapes."""
    result: dict[str, Any] = {}
    for status in sorted({failure.status for failure in FAILURES}):
        headers = [REQUEST_ID_HEADER]
        if status in (429, 503):
            headers.append(hdrs.RETRY_AFTER)
        if status == 401:
            headers.append(hdrs.WWW_AUTHENTICATE)
        causes = [each for each in FAILURES if each.status == status]
        description = "; ".join(f"{each.meaning} ({each.quoted_codes})" for each in causes)
        for shape in (openai.ErrorBody, anthropic.MessageError):
            schema: dict[str, Any] = reference(shape)
            if shape is anthropic.MessageError and status == 400:
                # The path of malformed HTTP is unknown, so its error has OpenAI's shape.
                schema = {"anyOf": [schema, reference(openai.ErrorBody)]}
            result[f"{shape.__name__}{status}"] = {
                "description": description,
                "headers": _header_refs(headers),
                "content": {"application/json": {"schema": schema}},
            }
    return result


def _header_refs(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
