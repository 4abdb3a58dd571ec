"""The KV bytes of the engines of a local cluster."""

from __future__ import annotations

from aiohttp import web

from baton_local.kv_bytes import fetch_kv_bytes, format_kv_bytes, kv_bytes_received
from baton_local.service_status import PodStatus, ServiceStatus
from support.http_server import serving


async def test_kv_bytes_are_read_from_engines_that_respond(monkeypatch) -> None:
    async def health(request: web.Request) -> web.Response:
        return web.json_response(
            {"reason": "Serving", "message": "", "kv_bytes": {"ucx tcp/lo": 3 * 2**19}}
        )

    pods = [
        PodStatus("demo-prefill-0", "prefill", "127.0.0.1", "Running", True, 0, ""),
        PodStatus("demo-decode-0", "decode", "127.0.0.1", "Running", True, 0, ""),
        PodStatus("demo-decode-1", "decode", "127.0.0.2", "Running", True, 0, ""),
        PodStatus("demo-gateway-0", "gateway", "127.0.0.1", "Running", True, 0, ""),
    ]
    async with serving(web.get("/health", health)) as port:
        monkeypatch.setattr("baton_local.kv_bytes.ENGINE_HTTP_PORT", port)
        found = await fetch_kv_bytes(
            ServiceStatus("demo", "default", "", "demo", [], pods, "", "/k")
        )
    assert [bool(pod.kv_bytes) for pod in found.pods] == [True, True, False, False]
    received = kv_bytes_received(found.pods)
    assert received == {"ucx tcp/lo": 3 * 2**19}, "only bytes of decode pods count"
    assert (
        format_kv_bytes(received | {"tcp sockets": 2**20})
        == "1.00 MiB over tcp sockets, 1.50 MiB over ucx tcp/lo"
    )
