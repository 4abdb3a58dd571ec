"""The API server over HTTPS, beyond the conformance tests (tests/e2e)."""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from pocketkube.apiserver.resources import BUILTIN, markdown_table
from pocketkube.certificates import create_certificates
from pocketkube.websockets import accept, run_until_closed
from support.http_server import serving
from support.pocketkube.flood import flooding
from support.waiting import until

MAPS = "/api/v1/namespaces/default/configmaps"


class Client:
    """Sends JSON requests from the running event loop."""

    def __init__(self, kubeconfig: Path) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        headers = {"Authorization": f"Bearer {document['users'][0]['user']['token']}"}
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=authority))
        self.session = aiohttp.ClientSession(
            cluster["server"], headers=headers, connector=connector
        )

    async def __call__(
        self, method: str, path: str, body: object = None, **query: str
    ) -> tuple[int, dict]:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        async with self.session.request(
            method, path, params=query, data=data, headers={"Content-Type": kind}
        ) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def call(plane) -> AsyncIterator[Client]:
    client = Client(plane.kubeconfig)
    yield client
    await client.session.close()


async def test_unserved_paths_and_methods_are_refused_with_a_status(call) -> None:
    for method, path, code in (
        ("GET", "/apis/apps/v1/statefulsets", 404),
        ("POST", "/api/v1/namespaces/default/pods/x/eviction", 404),
        ("GET", "/api/v1/pods?labelSelector=size%3E1", 400),
        ("PUT", MAPS, 405),
    ):
        status, body = await call(method, path, {})
        assert (status, body["kind"]) == (code, "Status"), path


async def test_every_kind_is_served_and_documented(call) -> None:
    for resource in BUILTIN:
        base = f"/apis/{resource.api_version}" if resource.group else f"/api/{resource.version}"
        status, body = await call("GET", f"{base}/{resource.plural}")
        assert (status, body["kind"]) == (200, resource.list_kind_name)
        assert f"| {resource.kind} |" in markdown_table()


async def test_unknown_fields_of_built_in_kinds_are_refused_when_strict_and_pruned_otherwise(
    call,
) -> None:
    spec = {"containers": [{"name": "c", "image": "i", "imagee": "x"}]}
    pods, pod = "/api/v1/namespaces/default/pods", {"metadata": {"name": "strict"}, "spec": spec}
    status, body = await call("POST", pods, pod, fieldValidation="Strict")
    assert status == 400
    assert 'unknown field "spec.containers[0].imagee"' in body["message"]
    status, body = await call("POST", pods, pod)
    assert status == 201
    assert "imagee" not in body["spec"]["containers"][0]


async def test_a_watch_from_before_the_event_window_is_expired(call) -> None:
    _, first = await call("POST", MAPS, {"metadata": {"name": "busy"}})
    for count in range(25):
        await call("PATCH", f"{MAPS}/busy", {"data": {"n": str(count)}})
    version = first["metadata"]["resourceVersion"]
    query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "5"}
    async with call.session.get(MAPS, params=query) as response:
        event = json.loads(await response.content.readline())
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == (
        "ERROR",
        410,
        "Expired",
    )


async def test_a_version_of_an_earlier_server_is_expired(call) -> None:
    async with call.session.get(
        MAPS, params={"watch": "true", "resourceVersion": "999999"}
    ) as response:
        assert json.loads(await response.content.readline())["object"]["code"] == 410


async def test_streaming_lists_end_with_a_bookmark(call) -> None:
    query = {
        "watch": "true",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "1",
    }
    async with call.session.get("/api/v1/namespaces", params=query) as response:
        events = [json.loads(line) for line in (await response.text()).splitlines()]
    kinds = [event["type"] for event in events]
    end = kinds.index("BOOKMARK")
    assert kinds[:end] == ["ADDED"] * 4
    assert events[end]["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"] == "true"


async def test_an_object_whose_owner_never_existed_is_collected(call) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "ghost", "uid": "no-such-uid"}
    await call("POST", MAPS, {"metadata": {"name": "orphan", "ownerReferences": [owner]}})

    async def is_gone() -> bool:
        return (await call("GET", f"{MAPS}/orphan"))[0] == 404

    await until(is_gone, "the collection of the object")


async def test_a_token_is_invalid_after_its_service_account_is_deleted(call) -> None:
    accounts = "/api/v1/namespaces/default/serviceaccounts"
    await call("POST", accounts, {"metadata": {"name": "robot"}})
    _, answer = await call("POST", f"{accounts}/robot/token", {"spec": {}})
    headers = {"Authorization": f"Bearer {answer['status']['token']}"}
    async with call.session.get(MAPS, headers=headers) as response:
        assert response.status == 200
    await call("DELETE", f"{accounts}/robot")
    async with call.session.get(MAPS, headers=headers) as response:
        assert response.status == 401


async def test_malformed_tokens_and_bodies_are_refused(call) -> None:
    for token in ("", "x.y.z", "a" * 500):
        async with call.session.get(MAPS, headers={"Authorization": f"Bearer {token}"}) as response:
            assert response.status == 401
    async with call.session.post(
        MAPS, data=b"{", headers={"Content-Type": "application/json"}
    ) as response:
        assert (response.status, (await response.json())["reason"]) == (400, "BadRequest")
    for body in ([], "text", {"metadata": []}, {"metadata": {"labels": {"a": 1}}}):
        assert (await call("POST", MAPS, body))[0] == 400


@asynccontextmanager
async def kubelet_serving(
    call: Client, folder: Path, pod: str, *routes: web.RouteDef
) -> AsyncIterator[str]:
    """Serve `routes` as the kubelet of a new pod. Yield the path of the pod."""
    files = create_certificates(folder, ["127.0.0.1"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files.certificate, files.key)
    async with serving(*routes, tls=tls) as port:
        await call("POST", "/api/v1/nodes", {"metadata": {"name": pod}})
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        status = {"addresses": addresses, "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}
        assert (await call("PATCH", f"/api/v1/nodes/{pod}/status", {"status": status}))[0] == 200
        spec = {"nodeName": pod, "containers": [{"name": "main", "image": "i"}]}
        pods = "/api/v1/namespaces/default/pods"
        assert (await call("POST", pods, {"metadata": {"name": pod}, "spec": spec}))[0] == 201
        yield f"{pods}/{pod}"


async def test_logs_stream_from_the_pods_kubelet(call, tmp_path) -> None:
    seen = {}

    async def container_logs(request: web.Request) -> web.StreamResponse:
        seen.update(request.match_info, **request.query)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first\n")
        await released.wait()
        await response.write(b"second\n")
        return response

    released = asyncio.Event()
    logs = web.get("/containerLogs/{namespace}/{pod}/{container}", container_logs)
    async with kubelet_serving(call, tmp_path, "talks", logs) as pod:
        async with call.session.get(
            f"{pod}/log", params={"follow": "true", "tailLines": "5"}
        ) as response:
            assert await response.content.readline() == b"first\n"
            released.set()
            assert await response.content.read() == b"second\n"
        assert seen == {
            "namespace": "default",
            "pod": "talks",
            "container": "main",
            "follow": "true",
            "tailLines": "5",
        }
        code, body = await call("GET", f"{pod}/log", container="other")
        assert (code, "container other is not valid" in body["message"]) == (400, True)
    code, body = await call("GET", f"{pod}/log")
    assert (code, body["reason"]) == (502, "BadGateway")


async def test_metrics_are_those_that_kubelets_measure(call, tmp_path) -> None:
    def usage(cpu: float, memory: int) -> dict:
        time = "2026-01-01T00:00:00Z"
        return {
            "cpu": {"time": time, "usageNanoCores": round(cpu * 1e9)},
            "memory": {"time": time, "workingSetBytes": memory * 2**20},
        }

    async def summary(_: web.Request) -> web.Response:
        reference = {"namespace": "default", "name": "busy", "uid": "u"}
        pod = {"podRef": reference, "containers": [{"name": "main", **usage(0.25, 3)}]}
        gone = {"podRef": {**reference, "name": "gone"}, "containers": pod["containers"]}
        node = {"nodeName": "busy", **usage(1.5, 70)}
        return web.json_response({"node": node, "pods": [pod, gone]})

    base = "/apis/metrics.k8s.io/v1beta1"
    pods = f"{base}/namespaces/default/pods"
    async with kubelet_serving(call, tmp_path, "busy", web.get("/stats/summary", summary)) as path:
        labels = {"metadata": {"labels": {"app": "x"}}}
        assert (await call("PATCH", path, labels))[0] == 200
        await call("POST", "/api/v1/nodes", {"metadata": {"name": "without-kubelet"}})
        _, found = await call("GET", f"{base}/nodes")
        assert found["kind"] == "NodeMetricsList"
        assert [(each["metadata"]["name"], each["usage"]) for each in found["items"]] == [
            ("busy", {"cpu": "1500000000n", "memory": "71680Ki"})
        ]
        status, node = await call("GET", f"{base}/nodes/busy")
        assert (status, node["kind"], node["window"]) == (200, "NodeMetrics", "1s")
        _, found = await call("GET", f"{base}/pods", labelSelector="app=x")
        [pod] = found["items"]
        assert (pod["metadata"]["name"], pod["metadata"]["labels"]) == ("busy", {"app": "x"})
        usage_of_main = {"cpu": "250000000n", "memory": "3072Ki"}
        assert pod["containers"] == [{"name": "main", "usage": usage_of_main}]
        assert (await call("GET", f"{pods}/busy"))[1]["containers"] == pod["containers"]
        assert (await call("GET", pods, labelSelector="app=y"))[1]["items"] == []
        for name in ("gone", "nowhere"):
            status, body = await call("GET", f"{pods}/{name}")
            assert (status, name in body["message"]) == (404, True)
        for method, url in (("POST", pods), ("DELETE", f"{pods}/busy"), ("GET", f"{pods}?watch=1")):
            assert (await call(method, url, {}))[0] == 405
    assert (await call("GET", f"{base}/nodes"))[1]["items"] == []


async def test_exec_connects_the_client_with_the_pods_kubelet(call, tmp_path) -> None:
    seen, closed = [], asyncio.Event()

    async def run(request: web.Request) -> web.StreamResponse:
        seen.append(request.path_qs)
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"], max_msg_size=0)
        await socket.prepare(request)
        async for message in socket:
            if message.data == b"\0end":
                await socket.close()
            else:
                await socket.send_bytes(b"\1" + message.data)
        closed.set()
        return socket

    route = web.get("/exec/{namespace}/{pod}/{container}", run)
    async with kubelet_serving(call, tmp_path, "runs", route) as pod:
        path = f"{pod}/exec?command=a&command=b%26c&stdin=true&stdout=1&tty=false"
        protocols = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
        async with call.session.ws_connect(path, protocols=protocols, max_msg_size=0) as socket:
            assert socket.protocol == "v4.channel.k8s.io"
            await socket.send_bytes(b"\0" + b"x" * 5_000_000)
            assert await socket.receive_bytes() == b"\1\0" + b"x" * 5_000_000
            await socket.send_bytes(b"\0end")
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        assert seen == ["/exec/default/runs/main?command=a&command=b%26c&input=1&output=1"]
        closed.clear()
        async with call.session.ws_connect(path, protocols=protocols):
            pass
        async with asyncio.timeout(30):
            await closed.wait()


@pytest.mark.parametrize("has_output", [False, True])
async def test_a_kubelet_that_does_not_read_notices_that_the_client_has_left(
    call, tmp_path, has_output
) -> None:
    left = asyncio.Event()

    async def run(request: web.Request) -> web.StreamResponse:
        socket = await accept(request, ["v5.channel.k8s.io"])

        async def write() -> None:
            while has_output:
                await socket.send_bytes(bytes(2**16))
                # send_bytes() does not yield to the event loop once the connection is lost.
                await asyncio.sleep(0)
            await asyncio.Event().wait()

        try:
            await run_until_closed(socket, asyncio.Event().wait(), write())
        finally:
            left.set()
        return socket

    route = web.get("/exec/{namespace}/{pod}/{container}", run)
    async with kubelet_serving(call, tmp_path, f"stalls-{int(has_output)}", route) as pod:
        socket = await call.session.ws_connect(
            f"{pod}/exec?command=a&stdin=true", protocols=["v5.channel.k8s.io"]
        )
        async with flooding(socket), asyncio.timeout(30):
            await call.session.close()  # without a close message
            await left.wait()


async def test_streams_of_pods_are_refused_with_a_status(call, tmp_path) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise web.HTTPForbidden

    routes = [web.get("/portForward/{namespace}/{pod}", refuse)]
    websocket = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
    }
    spdy = {"Connection": "Upgrade", "Upgrade": "SPDY/3.1"}
    async with kubelet_serving(call, tmp_path, "refuses", *routes) as pod:
        for method, path, headers, code, message in (
            ("GET", "exec", websocket, 400, "at least 1 command"),
            ("GET", "exec?command=x&container=y", websocket, 400, "container y is not valid"),
            ("GET", "exec?command=x", {}, 400, "Upgrade request required"),
            ("POST", "portforward", spdy, 400, "Upgrade request required"),
            ("GET", "portforward?ports=80,http", websocket, 400, "'http' is not a port"),
            ("GET", "portforward?ports=80", websocket, 403, "with HTTP 403"),
            ("GET", "attach", websocket, 404, "with HTTP 404"),
            ("DELETE", "exec", {}, 405, "offers create, get"),
        ):
            async with call.session.request(method, f"{pod}/{path}", headers=headers) as response:
                status = await response.json()
            assert (response.status, status["kind"]) == (code, "Status"), path
            assert message in status["message"]


@pytest.mark.parametrize(
    ("method", "path", "accepted"),
    [
        ("POST", MAPS, "application/json, application/yaml"),
        ("DELETE", f"{MAPS}/missing", "application/json, application/yaml"),
        (
            "PATCH",
            f"{MAPS}/missing",
            "application/json-patch+json, application/merge-patch+json, "
            "application/strategic-merge-patch+json, application/apply-patch+yaml",
        ),
    ],
)
async def test_bodies_of_an_unknown_media_type_are_refused(call, method, path, accepted) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        async with call.session.request(
            method, path, data=b"{}", headers={"Content-Type": kind}
        ) as response:
            status = await response.json()
        assert (response.status, status["reason"]) == (415, "UnsupportedMediaType")
        assert status["message"] == (
            "the body of the request was in an unknown format - accepted media types include: "
            + accepted
        )


async def test_a_body_without_a_media_type_is_json(call) -> None:
    body = json.dumps({"metadata": {"name": "untyped"}}).encode()
    skip = {"skip_auto_headers": ["Content-Type"]}
    async with call.session.post(MAPS, data=body, **skip) as response:
        assert response.status == 201
    yaml_body = b"metadata: {name: from-yaml}"
    headers = {"Content-Type": "application/yaml; charset=utf-8"}
    async with call.session.post(MAPS, data=yaml_body, headers=headers) as response:
        assert response.status == 201


async def test_services_have_different_addresses(call) -> None:
    services = "/api/v1/namespaces/default/services"
    given = set()
    for index in range(5):
        spec = {"ports": [{"port": 80}]}
        _, service = await call("POST", services, {"metadata": {"name": f"s{index}"}, "spec": spec})
        given.add(service["spec"]["clusterIP"])
    assert len(given) == 5
    taken = {
        "metadata": {"name": "taken"},
        "spec": {"clusterIP": given.pop(), "ports": [{"port": 80}]},
    }
    assert (await call("POST", services, taken))[0] == 422
    node_port = {"metadata": {"name": "np"}, "spec": {"type": "NodePort", "ports": [{"port": 80}]}}
    code, body = await call("POST", services, node_port)
    assert (code, body["details"]["causes"][0]["field"]) == (422, "spec.type")


async def test_a_watch_ends_at_once_when_its_client_disconnects(plane, call) -> None:
    """It does not wait for the next event."""

    def connections() -> set[asyncio.Task]:
        tasks = asyncio.all_tasks(plane._loop)
        return {task for task in tasks if task.get_coro().__qualname__ == "RequestHandler.start"}

    before = connections()  # connections of earlier clients may still be ending
    response = await call.session.get(MAPS, params={"watch": "true"})
    [ours] = connections() - before
    response.close()
    await until(ours.done, "the watch ended")


async def test_a_volume_name_with_a_path_is_refused(call) -> None:
    spec = {
        "containers": [{"name": "c", "image": "i"}],
        "volumes": [{"name": "../../x", "emptyDir": {}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    status, body = await call("POST", "/api/v1/namespaces/default/pods", pod)
    assert (status, "spec.volumes[0].name" in body["message"]) == (422, True)
