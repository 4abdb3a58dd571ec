"""The requests that the client sends, and its results for each response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.config import ConfigException

from baton_kube import client
from baton_kube.client import ByteBudget, KubeClient, KubeError, WritesForbiddenError, connect
from support.kube.kube_api_server import PODS, ApiServer, event, pod, serving, streamed


@pytest.fixture
def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def kube(server: ApiServer) -> AsyncIterator[KubeClient]:
    async with serving(server) as kube:
        yield kube


def answers(
    server: ApiServer, *bodies: Any, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Respond with one of `bodies` per request, and with the last one to all later requests."""
    left = list(bodies)

    async def handler(request: web.Request) -> web.Response:
        body = left.pop(0) if len(left) > 1 else left[0]
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(text=text, status=status, headers=headers)

    server.handler = handler


def hangs(server: ApiServer) -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    server.handler = handler


async def watched(
    kube: KubeClient, silence_s: float = 60.0, **selectors: str
) -> list[tuple[str, str]]:
    seen = []
    watch = kube.watch(PODS, "7", timeout_s=30.0, silence_s=silence_s, **selectors)
    async with aclosing(watch) as events:
        async for kind, obj in events:
            seen.append((kind, obj["metadata"]["resourceVersion"]))
    return seen


# Requests


async def test_a_consistent_list_is_read_in_pages(server: ApiServer, kube: KubeClient) -> None:
    first = {"metadata": {"resourceVersion": "7", "continue": "token"}, "items": [pod("a", 1)]}
    answers(server, first, {"metadata": {"resourceVersion": "7"}, "items": [pod("b", 2)]})
    assert await kube.list(PODS, label_selector="a in (b,c)", field_selector="x=y") == (
        [pod("a", 1), pod("b", 2)],
        "7",
    )
    selectors = {"labelSelector": "a in (b,c)", "fieldSelector": "x=y"}
    assert [asked.query for asked in server.asked] == [
        {**selectors, "limit": "500"},
        {**selectors, "limit": "500", "continue": "token"},
    ]


async def test_a_large_object_is_not_decoded(server: ApiServer, kube: KubeClient) -> None:
    answers(server, pod("a", 1))
    size = len(json.dumps(pod("a", 1)))
    assert await kube.get(f"{PODS}/a", budget=ByteBudget(size)) == pod("a", 1)
    with pytest.raises(KubeError, match=f"more than {size - 1} bytes"):
        await kube.get(f"{PODS}/a", budget=ByteBudget(size - 1))


async def test_names_are_read_in_pages(server: ApiServer, kube: KubeClient) -> None:
    first = {"metadata": {"resourceVersion": "7", "continue": "token"}, "items": [pod("a", 1)]}
    answers(server, first, {"metadata": {"resourceVersion": "7"}, "items": [pod("b", 2)]})
    assert [name for _, name in await kube.names(PODS, 1)] == ["a", "b"]
    assert [(asked.query, asked.accept) for asked in server.asked] == [
        ({"limit": "1"}, client.METADATA_LIST),
        ({"limit": "1", "continue": "token"}, client.METADATA_LIST),
    ]


async def test_a_list_of_too_many_bytes_is_refused(server: ApiServer, kube: KubeClient) -> None:
    first = {"metadata": {"resourceVersion": "7", "continue": "token"}, "items": [pod("a", 1)]}
    last = {"metadata": {"resourceVersion": "7"}, "items": [pod("b", 2)]}
    size = len(json.dumps(first)) + len(json.dumps(last))
    answers(server, first, last)
    assert len((await kube.list(PODS, budget=ByteBudget(size)))[0]) == 2
    answers(server, first, last)
    with pytest.raises(KubeError, match=f"more than {size - 1} bytes"):
        await kube.list(PODS, budget=ByteBudget(size - 1))


async def test_a_budget_counts_reads_of_the_budgets_within_it(
    server: ApiServer, kube: KubeClient
) -> None:
    size = len(json.dumps(pod("a", 1)))
    whole = ByteBudget(2 * size - 1)
    answers(server, pod("a", 1))
    await kube.get(f"{PODS}/a", budget=ByteBudget(size, whole))
    with pytest.raises(KubeError, match=f"more than {2 * size - 1} bytes"):
        await kube.get(f"{PODS}/a", budget=ByteBudget(size, whole))
    assert whole.is_exceeded
    assert whole.num_read == size


async def test_a_list_from_the_watch_cache_has_no_limit_and_follows_pages(
    server: ApiServer, kube: KubeClient
) -> None:
    first = {"metadata": {"resourceVersion": "7", "continue": "token"}, "items": [pod("a", 1)]}
    answers(server, first, {"metadata": {"resourceVersion": "7"}, "items": None})
    assert await kube.list(PODS, not_older_than="0") == ([pod("a", 1)], "7")
    assert [asked.query for asked in server.asked] == [
        {"resourceVersion": "0", "resourceVersionMatch": "NotOlderThan"},
        {"continue": "token"},
    ]


async def test_each_write_sends_its_verb_content_type_and_options(
    server: ApiServer, kube: KubeClient
) -> None:
    answers(server, {"kind": "Pod"})
    verbs: list[tuple[str, str, int]] = []
    kube.on_request = lambda verb, path, code: verbs.append((verb, path, code))
    path = f"{PODS}/a"
    await kube.create(PODS, {"n": 1}, field_manager="me")
    await kube.replace(path, {"n": 2})
    await kube.merge(path, {"n": None})
    await kube.apply(path, {"n": 4}, field_manager="me")
    await kube.delete(path, uid="u", grace_s=0)
    await kube.delete(path)
    await kube.get(path, metadata_only=True, query=[("a", "b")])
    options = {"apiVersion": "v1", "kind": "DeleteOptions"}
    full = {**options, "preconditions": {"uid": "u"}, "gracePeriodSeconds": 0}
    assert [
        (asked.method, asked.content_type, asked.query, asked.body) for asked in server.asked
    ] == [
        ("POST", "application/json", {"fieldManager": "me"}, {"n": 1}),
        ("PUT", "application/json", {}, {"n": 2}),
        ("PATCH", "application/merge-patch+json", {}, {"n": None}),
        (
            "PATCH",
            "application/apply-patch+yaml",
            {"fieldManager": "me", "force": "true"},
            {"n": 4},
        ),
        ("DELETE", "application/json", {}, full),
        ("DELETE", "application/json", {}, options),
        ("GET", "application/json", {"a": "b"}, None),
    ]
    assert server.asked[-1].accept.startswith("application/json;as=PartialObjectMetadata;")
    assert [verb for verb, _, _ in verbs] == [
        "create",
        "update",
        "patch",
        "apply",
        "delete",
        "delete",
        "get",
    ]
    assert verbs[0][1:] == (PODS, 200)


async def test_an_error_has_the_code_the_reason_and_the_message(
    server: ApiServer, kube: KubeClient
) -> None:
    status = {"kind": "Status", "reason": "AlreadyExists", "message": 'pods "a" already exists'}
    answers(server, status, status=409)
    with pytest.raises(KubeError, match=r'^pods "a" already exists$') as caught:
        await kube.create(PODS, {})
    assert (caught.value.status, caught.value.reason, caught.value.retry_after_s) == (
        409,
        "AlreadyExists",
        None,
    )


@pytest.mark.parametrize(
    ("body", "headers", "message", "retry_after_s"),
    [
        ({"message": "slow down"}, {"Retry-After": "3"}, "slow down", 3.0),
        ({"message": "slow down", "details": {"retryAfterSeconds": 2}}, {}, "slow down", 2.0),
        (
            {"message": "later", "details": "odd"},
            {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"},
            "later",
            None,
        ),
        ("<html>busy</html>", {"Retry-After": "1"}, "<html>busy</html>", 1.0),
        ("[]", {}, "[]", None),
        ("", {}, "HTTP 429", None),
    ],
)
async def test_error_bodies_of_any_form_are_read(
    server: ApiServer,
    kube: KubeClient,
    body: Any,
    headers: dict[str, str],
    message: str,
    retry_after_s: float | None,
) -> None:
    answers(server, body, status=429, headers=headers)
    with pytest.raises(KubeError) as caught:
        await kube.get(PODS)
    assert (caught.value.status, str(caught.value), caught.value.retry_after_s) == (
        429,
        message,
        retry_after_s,
    )


@pytest.mark.parametrize("body", ["<html>maintenance</html>", "[1]", ""])
async def test_a_response_that_is_no_json_object_is_a_connection_error(
    server: ApiServer, kube: KubeClient, body: str
) -> None:
    answers(server, body)
    with pytest.raises(ConnectionError, match=r"not JSON|not a JSON object"):
        await kube.get(PODS)


async def test_an_unreachable_server_is_a_connection_error() -> None:
    codes: list[int] = []
    async with serving(ApiServer()) as kube:
        kube.on_request = lambda verb, path, code: codes.append(code)
    with pytest.raises(ConnectionError, match=r"GET http://127.0.0.1"):
        await kube.get(PODS)
    with pytest.raises(ConnectionError):
        await watched(kube)
    assert codes == [0, 0]


async def test_a_request_times_out(
    server: ApiServer, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 0.2)
    hangs(server)
    with pytest.raises(TimeoutError, match=r"GET .*: no answer within 0.2 s"):
        await kube.get(PODS)


async def test_writes_obey_the_write_timeout_and_fail_when_it_is_zero(
    server: ApiServer, kube: KubeClient
) -> None:
    hangs(server)
    kube.write_timeout_s = lambda: 0.2
    with pytest.raises(TimeoutError, match=r"no answer within 0.2 s"):
        await kube.apply(f"{PODS}/a", {}, field_manager="me")
    answers(server, {})
    kube.write_timeout_s = lambda: 0.0
    asked = len(server.asked)
    for write in (kube.create(PODS, {}), kube.merge(f"{PODS}/a", {}), kube.delete(f"{PODS}/a")):
        with pytest.raises(WritesForbiddenError):
            await write
    assert len(server.asked) == asked
    assert await kube.get(PODS) == {}, "the write timeout applies to a read"


# Watches


async def test_a_watch_yields_events_and_bookmarks_until_its_end(
    server: ApiServer, kube: KubeClient
) -> None:
    server.handler = lambda request: streamed(
        request, event("ADDED", pod("a", 8)) + event("BOOKMARK", pod("", 9))
    )
    seen: list[tuple[str, str, int]] = []
    kube.on_request = lambda verb, path, code: seen.append((verb, path, code))
    assert await watched(kube, label_selector="a=b") == [("ADDED", "8"), ("BOOKMARK", "9")]
    assert server.asked[0].query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "7",
        "timeoutSeconds": "30",
        "labelSelector": "a=b",
    }
    assert seen == [("watch", PODS, 200)]


async def test_an_error_event_and_a_refused_watch_are_kube_errors(
    server: ApiServer, kube: KubeClient
) -> None:
    gone = {
        "kind": "Status",
        "code": 410,
        "reason": "Expired",
        "message": "too old resource version",
    }
    server.handler = lambda request: streamed(request, event("ERROR", gone))
    with pytest.raises(KubeError, match="too old") as caught:
        await watched(kube)
    assert (caught.value.status, caught.value.reason) == (410, "Expired")
    answers(
        server, {"reason": "Forbidden", "message": "no"}, status=403, headers={"Retry-After": "1"}
    )
    with pytest.raises(KubeError, match="no") as caught:
        await watched(kube)
    assert (caught.value.status, caught.value.retry_after_s) == (403, 1.0)


async def test_a_silent_watch_times_out(server: ApiServer, kube: KubeClient) -> None:
    server.handler = lambda request: streamed(request, event("ADDED", pod("a", 8)), hang=True)
    with pytest.raises(TimeoutError, match=r"no event or bookmark for 0.3 s"):
        await watched(kube, silence_s=0.3)


@pytest.mark.parametrize("cut", [False, True])
async def test_an_incomplete_event_is_a_connection_error(
    server: ApiServer, kube: KubeClient, cut: bool
) -> None:
    line = event("ADDED", pod("a", 8))
    server.handler = lambda request: streamed(request, line[: len(line) // 2], cut=cut)
    with pytest.raises(ConnectionError):
        await watched(kube)


async def test_an_event_may_be_as_large_as_an_object(server: ApiServer, kube: KubeClient) -> None:
    large = {**pod("a", 8), "data": "x" * 3_000_000}
    server.handler = lambda request: streamed(request, event("ADDED", large))
    assert await watched(kube) == [("ADDED", "8")]


# Connections


async def test_rotated_tokens_are_used_by_requests_and_sessions(
    server: ApiServer, kube: KubeClient
) -> None:
    answers(server, {})
    configuration = kube._api.configuration
    configuration.api_key["BearerToken"] = "Bearer 0"
    rotations = iter(range(1, 10))
    configuration.refresh_api_key_hook = lambda c: c.api_key.update(
        BearerToken=f"Bearer {next(rotations)}"
    )
    order: list[str] = []

    async def seen(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        order.append(request.headers.get("Authorization", ""))
        return await handler(request)

    await kube.get(PODS)
    async with kube.http_session(seen) as session:
        for _ in range(2):
            async with session.get(
                kube.server + PODS, headers={"Authorization": "theirs"}
            ) as response:
                assert response.status == 200
    assert [asked.token for asked in server.asked] == ["Bearer 1", "Bearer 2", "Bearer 3"]
    assert order == ["theirs", "theirs"], (
        "the given middlewares run before the one that sets the token"
    )


async def test_a_token_that_cannot_be_read_is_a_connection_error(kube: KubeClient) -> None:
    def refresh(_: object) -> None:
        raise ConfigException("Token file exists but empty.")

    kube._api.configuration.api_key["BearerToken"] = "Bearer 0"
    kube._api.configuration.refresh_api_key_hook = refresh
    with pytest.raises(ConnectionError, match="Token file"):
        await kube.get(PODS)


async def test_the_proxy_of_the_environment_is_used_for_all_requests(
    server: ApiServer, kube: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(server, {})
    path = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "http://kube.invalid"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    path.write_text(
        json.dumps(
            {"current-context": "c", "clusters": [cluster], "contexts": [context], "users": users}
        )
    )
    monkeypatch.setenv("http_proxy", kube.server)
    async with connect(path) as proxied, proxied.http_session() as session:
        await proxied.get(PODS)
        async with session.get(proxied.server + PODS) as response:
            assert response.status == 200
    assert len(server.asked) == 2
    monkeypatch.setenv("no_proxy", "kube.invalid")
    async with connect(path) as direct:
        with pytest.raises(ConnectionError):
            await direct.get(PODS)
    assert len(server.asked) == 2


@pytest.mark.parametrize("server", ["https://[::1]:6443", "https://10.96.0.1:443"])
async def test_no_proxy_lists_servers_by_address(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "")
    assert client._environment_proxy(server) == "http://proxy:3128"
    monkeypatch.setenv("no_proxy", "::1,10.96.0.1")
    assert client._environment_proxy(server) is None


async def test_errors_do_not_contain_the_password_of_a_proxy(
    server: ApiServer, kube: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(server, {}, status=407)
    path = tmp_path / "kubeconfig"
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    cluster = {"name": "c", "cluster": {"server": "https://kube.invalid"}}
    users = [{"name": "u", "user": {}}]
    path.write_text(
        json.dumps(
            {"current-context": "c", "clusters": [cluster], "contexts": [context], "users": users}
        )
    )
    monkeypatch.setenv("https_proxy", kube.server.replace("//", "//user:secret@"))
    async with connect(path) as proxied:
        with pytest.raises(ConnectionError) as raised:
            await proxied.get(PODS)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{", "{clusters: 1}", "current-context: none\ncontexts: []"]
)
async def test_a_missing_or_invalid_kubeconfig_is_a_config_exception(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigException):
        async with connect(path):
            pass


async def test_outside_of_a_cluster_the_service_account_is_a_config_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigException):
        async with connect(service_account=tmp_path):
            pass
