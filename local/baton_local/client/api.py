"""A JSON client for an API server. Objects stay the dictionaries the server sent, so that fields this package does not know
(other versions, defaults, extensions) survive a round trip; connection and credentials come from `kubernetes.aio`.
"""

import base64
import json
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import yaml
from kubernetes.aio import config

# An object of the Kubernetes API as JSON. Any: its shape is the API's schema, which the server checks.
Json = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"


class ApiError(Exception):
    """The API server refused a request, or could not be reached (status 0)."""

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @classmethod
    def from_body(cls, status: int, body: bytes) -> Self:
        """Read a `Status` object, or whatever else a server or a proxy answered."""
        try:
            parsed = json.loads(body)
        except ValueError:
            parsed = {}
        if not isinstance(parsed, dict):
            parsed = {}
        text = parsed.get("message") or body.decode("utf-8", "replace")[:500]
        return cls(status, str(parsed.get("reason") or ""), str(text))


class Api:
    """One connection pool to one API server."""

    # Any: `kubernetes.aio` has no types.
    def __init__(self, client: Any, ca_pem: bytes = b""):
        self._client = client
        self.server: str = client.configuration.host
        self.ca_pem = ca_pem

    @classmethod
    async def from_kubeconfig(cls, path: str | Path) -> Self:
        """Connect as the current context of a kubeconfig.

        Raises:
            FileNotFoundError, kubernetes.aio.config.ConfigException: the file is missing or names no usable context.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"kubeconfig {path} does not exist; start the control plane first")
        client = await config.new_client_from_config(config_file=str(path), persist_config=False)
        return cls(client, _certificate_authority(Path(path)))

    @property
    def host_port(self) -> tuple[str, int]:
        """Where the server listens, as pods are told in KUBERNETES_SERVICE_HOST and _PORT."""
        parts = urlsplit(self.server)
        return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def get(self, path: str, **query: str | int) -> Json:
        """GET one object or a list. Raises: ApiError."""
        return await self._json("GET", path, query)

    async def create(self, path: str, body: Json) -> Json:
        """POST an object to its collection. Raises: ApiError (409 AlreadyExists)."""
        return await self._json("POST", path, body=body)

    async def replace(self, path: str, body: Json) -> Json:
        """PUT an object, guarded by its resourceVersion if it carries one. Raises: ApiError (409 Conflict)."""
        return await self._json("PUT", path, body=body)

    async def patch(self, path: str, body: Json) -> Json:
        """Apply a JSON merge patch. Raises: ApiError (409 if a precondition in `metadata` failed)."""
        return await self._json("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def delete(self, path: str, *, grace_s: int | None = None, uid: str = "", propagation: str = "") -> None:
        """DELETE an object; one that is gone already is fine. Raises: ApiError (409 if `uid` is another's)."""
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        if propagation:
            options["propagationPolicy"] = propagation
        try:
            await self._json("DELETE", path, body=options)
        except ApiError as error:
            if error.status != 404:
                raise

    async def watch(self, path: str, *, timeout_s: int, **query: str | int) -> AsyncIterator[tuple[str, Json]]:
        """Yield (event type, object) until the server ends the watch after `timeout_s`.

        Raises:
            ApiError: refused, or the server sent an ERROR event (410 when the resourceVersion is too old).
        """
        query = {**query, "watch": "true", "timeoutSeconds": timeout_s, "allowWatchBookmarks": "true"}
        # The server ends the watch; the margin is for one that forgot us.
        timeout = aiohttp.ClientTimeout(total=timeout_s + 15, sock_connect=10)
        response = await self._send("GET", path, query, timeout=timeout)
        try:
            if response.status >= 400:
                raise ApiError.from_body(response.status, await response.read())
            while line := await response.content.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ApiError(0, "WatchBroken", f"{path}: {error!r}") from error
        finally:
            response.close()

    async def _json(
        self,
        method: str,
        path: str,
        query: dict[str, str | int] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        response = await self._send(method, path, query or {}, body, content_type, aiohttp.ClientTimeout(total=30))
        async with response:
            try:
                raw = await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                raise ApiError(0, "Unreachable", f"{method} {path}: {error!r}") from error
        if response.status >= 400:
            raise ApiError.from_body(response.status, raw)
        answer: Json = json.loads(raw) if raw else {}
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str | int],
        body: Json | None = None,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        request = await self._client.param_serialize(
            method,
            path,
            query_params=[(key, str(value)) for key, value in query.items()],
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._client.call_api(*request, _request_timeout=timeout)
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, OSError) as error:
            raise ApiError(0, "Unreachable", f"{self.server}: {error!r}; is the API server running?") from error
        response: aiohttp.ClientResponse = answer.response
        return response


def key_of(obj: Json) -> str:
    """`namespace/name`, or the name alone for objects without a namespace."""
    metadata = obj["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])


def timestamp(when: datetime | None = None, *, micro: bool = False) -> str:
    """RFC 3339 as the API writes it: seconds (`metav1.Time`), or microseconds (`metav1.MicroTime`)."""
    when = (when or datetime.now(UTC)).astimezone(UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


def _certificate_authority(kubeconfig: Path) -> bytes:
    """The PEM of the current context's cluster; empty if the server is plain HTTP or not verified."""
    content = yaml.safe_load(kubeconfig.read_text())
    contexts = {entry["name"]: entry["context"] for entry in content.get("contexts") or []}
    clusters = {entry["name"]: entry["cluster"] for entry in content.get("clusters") or []}
    cluster = clusters[contexts[content["current-context"]]["cluster"]]
    if data := cluster.get("certificate-authority-data"):
        return base64.b64decode(data)
    if file := cluster.get("certificate-authority"):
        return (kubeconfig.parent / file).read_bytes()
    return b""
