"""A Kubernetes client that addresses objects by API path. Every request has a timeout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from kubernetes.aio import client, config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

#: An object of the Kubernetes API as JSON. Any: its shape is the API's schema, which the server
#: checks.
Object = dict[str, Any]
Query = Sequence[tuple[str, str]]

REQUEST_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 10.0
PAGE_SIZE = 500
#: Limit in bytes on the JSON of an object that the server returns for a write.
MAX_WRITTEN_BYTES = 2**19
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

# Limit in bytes on one line of a response, as in kubernetes.aio. A watch event is one line, which
# may be longer than aiohttp's default limit.
_READ_BUFFER = 2**21
_JSON = "application/json"
#: Values of the header Accept for the metadata of an object or a watch, and of a list.
METADATA = f"{_JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1,{_JSON}"
METADATA_LIST = f"{_JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,{_JSON}"


class KubeError(Exception):
    """An error response of the API server, or an ERROR event of a watch.

    Attributes:
        status: the HTTP code, or the code in the ERROR event.
        reason: Kubernetes' reason, for example `AlreadyExists`; empty if the server sent none.
        retry_after_s: seconds to wait before the next try, as the server requested; None if the
            server sent no value.
    """

    def __init__(
        self, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s


class ByteBudget:
    """Limits the total size of the responses that are read with this budget.

    The limit is checked before a response is decoded, because the decoded objects take up to 50
    times as much memory.
    """

    def __init__(self, max_bytes: int, within: ByteBudget | None = None) -> None:
        """Limit the total size of the responses to `max_bytes`.

        Args:
            max_bytes: limit of this budget, in bytes.
            within: a second budget that also counts and limits the bytes of each response. None:
                there is no second budget.
        """
        self._max_bytes = max_bytes
        self._within = within
        #: Number of bytes that were read so far.
        self.num_read = 0
        #: Whether a response was not read because of this budget.
        self.is_exceeded = False

    async def read(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        """Return the body of a response, and count its bytes.

        Raises:
            KubeError: status 413, the body exceeds what is left of this budget or of `within`.
        """
        budgets = [self] if self._within is None else [self, self._within]
        tightest = min(budgets, key=ByteBudget._left)
        try:
            body = await read_body(response, max(0, tightest._left()))
        except ValueError as error:
            raise tightest._refuse(path) from error
        for budget in budgets:
            budget.num_read += len(body)
        # Concurrent reads may have used the budgets while this body was read.
        if exceeded := next((each for each in budgets if each._left() < 0), None):
            raise exceeded._refuse(path)
        return body

    def _left(self) -> int:
        return self._max_bytes - self.num_read

    def _refuse(self, path: str) -> KubeError:
        self.is_exceeded = True
        message = f"{path} is too large: more than {self._max_bytes} bytes would be read"
        return KubeError(413, "RequestEntityTooLarge", message)


class _Name(msgspec.Struct):
    namespace: str = ""
    name: str = ""


class _Named(msgspec.Struct):
    metadata: _Name


class _PageMetadata(msgspec.Struct):
    token: str = msgspec.field(name="continue", default="")


class _NamePage(msgspec.Struct):
    """One page of a list. Of each object, only the name and the namespace are decoded."""

    metadata: _PageMetadata
    items: list[_Named] | None = None


class WritesForbiddenError(OSError):
    """Raised instead of sending a write when `KubeClient.write_timeout_s` returns 0 or less."""


class KubeClient:
    """A client of one API server.

    Paths are as in the API, for example `/apis/apps/v1/namespaces/x/deployments/y`.

    Methods that send a request raise KubeError if the server refuses the request. If no valid
    response arrives, they raise OSError or its subclass TimeoutError.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.server: str = api.configuration.host
        #: Called after each request with the verb (get, list, watch, create, apply, patch, update
        #: or delete), the path and the HTTP code of the response. Code 0: there was no response.
        self.on_request: Callable[[str, str, int], None] = lambda verb, path, code: None
        #: Returns the timeout in seconds for a write that is about to be sent. Values above
        #: REQUEST_TIMEOUT_S are reduced to it. At 0 or less the write is not sent.
        self.write_timeout_s: Callable[[], float] = lambda: REQUEST_TIMEOUT_S

    def sibling(self) -> KubeClient:
        """Return a new client that shares only the connections with this client.

        `on_request` and `write_timeout_s` of the new client have their defaults.
        """
        return KubeClient(self._api)

    async def get(
        self,
        path: str,
        *,
        metadata_only: bool = False,
        query: Query = (),
        budget: ByteBudget | None = None,
    ) -> Object:
        """Return the object at `path`, or a PartialObjectMetadata if `metadata_only` is set.

        Args:
            budget: limits the JSON of the object. None: no limit.

        Raises:
            KubeError: the request was refused; status 404 if there is no such object, 413 if the
                object exceeds `budget`.
        """
        accept = METADATA if metadata_only else _JSON
        return await self._request("get", "GET", path, query=query, accept=accept, budget=budget)

    async def list(
        self,
        path: str,
        *,
        label_selector: str = "",
        field_selector: str = "",
        not_older_than: str | None = None,
        budget: ByteBudget | None = None,
    ) -> tuple[list[Object], str]:
        """Return (objects, resource version) of the collection at `path`.

        A watch that starts at this resource version misses no event.

        Args:
            not_older_than: None requests a consistent read, in pages of PAGE_SIZE. A resource
                version lets the server reply from its watch cache, if the cache has reached that
                version. "0" accepts a state of any age.
            budget: limits the JSON of all objects. None: no limit.

        Raises:
            KubeError: the request was refused; status 410 if the resource version expired between
                two pages, 413 if the objects exceed `budget`.
        """
        query = _given(labelSelector=label_selector, fieldSelector=field_selector)
        query += [("limit", str(PAGE_SIZE))] if not_older_than is None else []
        match = _given(
            resourceVersion=not_older_than, resourceVersionMatch=not_older_than and "NotOlderThan"
        )
        found: list[Object] = []
        while True:
            page = await self._request("list", "GET", path, query=[*query, *match], budget=budget)
            found += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return found, metadata.get("resourceVersion") or ""
            match = [("continue", metadata["continue"])]  # the token carries the version

    async def names(self, path: str, page_size: int) -> Sequence[tuple[str, str]]:
        """Return (namespace, name) of each object of the collection at `path`.

        Other fields of the objects may be large, so they are not decoded.

        Args:
            page_size: maximum number of objects in one response of the server.

        Raises:
            KubeError: the request was refused; status 410 if the resource version expired between
                two pages.
        """
        found: list[tuple[str, str]] = []
        query = [("limit", str(page_size))]
        while True:
            page = await self._request(
                "list", "GET", path, query=query, accept=METADATA_LIST, type_=_NamePage
            )
            found += [(each.metadata.namespace, each.metadata.name) for each in page.items or ()]
            if not page.metadata.token:
                return found
            query = [("limit", str(page_size)), ("continue", page.metadata.token)]

    async def watch(
        self,
        path: str,
        version: str,
        *,
        timeout_s: float,
        silence_s: float,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """Yield (type, object) for each event after `version`, until the server ends the watch.

        Args:
            timeout_s: time after which the server ends the watch.
            silence_s: longest wait for the next event or bookmark.

        Raises:
            KubeError: the request was refused, or the server sent an ERROR event. With status 410,
                `version` is too old: list the collection again.
            TimeoutError: no event or bookmark arrived for `silence_s`.
            ConnectionError: the connection failed, or ended within an event.
        """
        query = _given(watch="true", allowWatchBookmarks="true", resourceVersion=version)
        query += _given(labelSelector=label_selector, fieldSelector=field_selector)
        query.append(("timeoutSeconds", str(max(1, round(timeout_s)))))
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s
        )
        code = 0
        try:
            with closing(
                await self._send("GET", path, query, {"Accept": _JSON}, timeout)
            ) as response:
                code = response.status
                if code != 200:
                    raise refusal(code, await response.read(), response.headers)
                while line := await response.content.readline():
                    yield _event(path, line)
        except aiohttp.SocketTimeoutError as error:
            raise TimeoutError(f"watch {path}: no event or bookmark for {silence_s:g} s") from error
        # ValueError: a line is longer than the buffer.
        except (aiohttp.ClientError, config.ConfigException, ValueError) as error:
            raise ConnectionError(f"watch {path}: {error_text(error)}") from error
        finally:
            self.on_request("watch", path, code)

    async def create(self, path: str, obj: Object, *, field_manager: str = "") -> Object:
        """Create `obj` in the collection at `path`. Return the stored object.

        Raises:
            KubeError: the request was refused; status 409 if the name is taken.
        """
        return await self._request(
            "create", "POST", path, body=obj, query=_given(fieldManager=field_manager)
        )

    async def replace(self, path: str, obj: Object) -> Object:
        """Replace the whole object at `path` with `obj`. Return the stored object.

        Raises:
            KubeError: the request was refused; status 409 if the resourceVersion of `obj` is not
                the current one.
        """
        return await self._request("update", "PUT", path, body=obj)

    async def merge(self, path: str, patch: Object, *, field_manager: str = "") -> Object:
        """Apply a JSON merge patch (RFC 7386) to the object at `path`. Return the stored object."""
        query, content_type = _given(fieldManager=field_manager), "application/merge-patch+json"
        return await self._request(
            "patch", "PATCH", path, body=patch, query=query, content_type=content_type
        )

    async def apply(
        self, path: str, obj: Object, *, field_manager: str, strict: bool = False
    ) -> Object:
        """Apply `obj` with server-side apply. Return the stored object.

        `field_manager` becomes the owner of all fields in `obj`, even if another manager owns them.

        Args:
            strict: the server refuses fields that are not in the schema. Servers before Kubernetes
                1.25 ignore this option and drop such fields.
        """
        query = _given(
            fieldManager=field_manager, force="true", fieldValidation="Strict" if strict else ""
        )
        content_type = "application/apply-patch+yaml"  # JSON is YAML
        return await self._request(
            "apply", "PATCH", path, body=obj, query=query, content_type=content_type
        )

    async def delete(self, path: str, *, uid: str = "", grace_s: int | None = None) -> Object:
        """Delete the object at `path`. Return the reply: the object's last state or a Status.

        Args:
            uid: delete only an object with this uid. Empty: any uid.
            grace_s: gracePeriodSeconds. None: the server's default.

        Raises:
            KubeError: the request was refused; status 404 if there is no such object, 409 if the
                object has another uid.
        """
        options = {"preconditions": {"uid": uid} if uid else None, "gracePeriodSeconds": grace_s}
        body = {name: value for name, value in options.items() if value is not None}
        return await self._request(
            "delete", "DELETE", path, body={"apiVersion": "v1", "kind": "DeleteOptions", **body}
        )

    def http_session(self, *middlewares: aiohttp.ClientMiddlewareType) -> aiohttp.ClientSession:
        """Return a new HTTP session with this client's TLS, proxy and credentials.

        The current token is read for each request, so a rotated token is used.
        """
        configuration = self._api.configuration

        async def authorize(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            if token := await configuration.get_api_key_with_prefix("BearerToken"):
                request.headers["Authorization"] = token
            if configuration.tls_server_name:
                request.server_hostname = configuration.tls_server_name
            return await handler(request)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._api.rest_client.ssl_context),
            middlewares=(*middlewares, authorize),
            proxy=configuration.proxy,
            read_bufsize=_READ_BUFFER,
        )

    async def _request(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: Query = (),
        content_type: str = _JSON,
        accept: str = _JSON,
        budget: ByteBudget | None = None,
        type_: Any = Object,
    ) -> Any:
        timeout_s = REQUEST_TIMEOUT_S
        if method != "GET":
            budget = ByteBudget(MAX_WRITTEN_BYTES)
            timeout_s = min(timeout_s, self.write_timeout_s())
            if timeout_s <= 0:
                raise WritesForbiddenError(
                    f"{method} {path}: not sent, because this process has lost its Lease"
                )
        headers = {"Accept": accept, "Content-Type": content_type}
        code = 0
        try:
            response = await self._send(
                method, path, query, headers, aiohttp.ClientTimeout(total=timeout_s), body
            )
            async with response:
                data = await (budget.read(response, path) if budget else response.read())
            code = response.status
        except TimeoutError as error:
            raise TimeoutError(f"{method} {path}: no answer within {timeout_s:.3g} s") from error
        except (aiohttp.ClientError, config.ConfigException) as error:
            raise ConnectionError(f"{method} {self.server}{path}: {error_text(error)}") from error
        finally:
            self.on_request(verb, path, code)
        if not 200 <= code <= 299:
            raise refusal(code, data, response.headers)
        try:
            return msgspec.json.decode(data, type=type_)
        except (ValueError, RecursionError) as error:  # for example an error page of a proxy
            raise ConnectionError(
                f"{method} {path}: the answer is not a JSON object: {error}"
            ) from error

    async def _send(
        self,
        method: str,
        path: str,
        query: Query,
        headers: Object,
        timeout: aiohttp.ClientTimeout,
        body: Any = None,
    ) -> aiohttp.ClientResponse:
        request = await self._api.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._api.call_api(*request, _request_timeout=timeout)
        return answer.response


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body of a response.

    Raises:
        ValueError: the body is longer than `limit` bytes. The rest is not read.
    """
    try:
        await response.content.readexactly(limit + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise ValueError(f"the body is longer than {limit} bytes")


def error_text(error: Exception) -> str:
    """Return the message of `error`, or the name of the error's class if the message is empty.

    The URL of the request is left out, because the URL of a proxy may contain a password.
    """
    if isinstance(error, aiohttp.ClientResponseError):
        return f"HTTP {error.status} {error.message}"
    return str(error) or type(error).__name__


def _given(**options: str | None) -> list[tuple[str, str]]:
    """Return the non-empty `options` as (name, value) pairs for a query string."""
    return [(name, value) for name, value in options.items() if value]


def refusal(code: int, body: bytes, headers: Mapping[str, str]) -> KubeError:
    """Return the KubeError for a response with which the server refuses a request.

    The reason and the message come from the metav1.Status in `body`. If `body` is not JSON, the
    message is the text of `body`.
    """
    text = body.decode(errors="replace")
    try:
        status = msgspec.json.decode(text, type=Object)
    except ValueError:
        status = {"message": text}
    error = _status_error(code, status, text or f"HTTP {code}")
    with suppress(KeyError, ValueError):  # ValueError: a date, which API servers do not send
        error.retry_after_s = float(headers["Retry-After"])
    return error


def _status_error(code: int, status: Object, message: str) -> KubeError:
    details = status.get("details")
    retry_after_s = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    return KubeError(
        code, status.get("reason") or "", status.get("message") or message, retry_after_s
    )


def _event(path: str, line: bytes) -> tuple[str, Object]:
    """Decode one line of a watch response into (type, object).

    Raises:
        KubeError: the line is an ERROR event.
        ConnectionError: the line is incomplete.
    """
    try:
        event = msgspec.json.decode(line)
        kind, obj = event["type"], event["object"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConnectionError(
            f"watch {path}: the connection ended within an event: {error!r}"
        ) from error
    if kind == "ERROR":
        raise _status_error(obj.get("code") or 500, obj, "the watch failed")
    return kind, obj


def _environment_proxy(server: str) -> str | None:
    """Return the URL of the proxy for `server`; None for a direct connection.

    The URL comes from HTTPS_PROXY, HTTP_PROXY and NO_PROXY.
    """
    url = urlsplit(server)
    is_direct = proxy_bypass(url.hostname or "") or proxy_bypass(url.netloc)
    return None if is_direct else getproxies().get(url.scheme)


@asynccontextmanager
async def connect(
    kubeconfig: Path | str | None = None, *, service_account: Path = SERVICE_ACCOUNT
) -> AsyncIterator[KubeClient]:
    """Yield a client of the API server that `kubeconfig` specifies.

    Args:
        kubeconfig: one path, or several joined by `os.pathsep`. None: connect to the cluster that
            runs this pod, with the pod's service account.
        service_account: the folder with the pod's `token` and `ca.crt`.

    Raises:
        kubernetes.aio.config.ConfigException: the kubeconfig or the service account is missing or
            not usable.
    """
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = 0  # no limit: every watch has a connection of its own
    # With trust_env each request would look up the proxy in a thread.
    configuration.client_session_kwargs = {"trust_env": False}
    try:
        if kubeconfig is not None:
            if not any(
                Path(file).expanduser().is_file() for file in str(kubeconfig).split(os.pathsep)
            ):
                raise config.ConfigException(f"kubeconfig {kubeconfig} does not exist")
            await config.load_kube_config(
                str(kubeconfig), client_configuration=configuration, persist_config=False
            )
        else:
            token, certificate = str(service_account / "token"), str(service_account / "ca.crt")
            InClusterConfigLoader(token, certificate).load_and_set(configuration)
        configuration.proxy = configuration.proxy or _environment_proxy(configuration.host)
        api = client.ApiClient(configuration)
    except config.ConfigException:
        raise
    # The library validates neither the file's structure nor its certificates.
    except Exception as error:
        source = (
            f"{kubeconfig} is not a kubeconfig"
            if kubeconfig is not None
            else "the pod's service account"
        )
        raise config.ConfigException(f"{source}: {' '.join(str(error).split())}") from error
    async with api:
        yield KubeClient(api)
