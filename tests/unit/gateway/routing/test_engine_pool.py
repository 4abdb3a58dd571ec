"""Discovery and the engine pool: engines are added, removed, drained and restarted."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from baton_gateway.routing import file_discovery
from baton_gateway.routing.file_discovery import FileDiscovery, parse_endpoints
from baton_gateway.routing.kubernetes_discovery import endpoint_of
from support.gateway.gateway_rig import GatewayRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"


async def test_added_engines_are_used_and_removed_ones_finish_their_requests(
    rig: GatewayRig,
) -> None:
    old, new = rig.engine("d0", "decode", TEXT, hold_after=2), rig.engine("d1", "decode", TEXT)
    await rig.start(old)
    running = asyncio.create_task(rig.complete())
    await until(lambda: old.adds, "the request at the old engine")
    rig.announce(new)
    await rig.connected(new)
    assert await rig.complete() == TEXT
    assert len(new.adds) == 1
    old.released.set()
    assert await running == TEXT
    assert not old.aborts


async def test_a_draining_engine_gets_no_new_requests(rig: GatewayRig) -> None:
    leaving, staying = rig.engine("d0", "decode", TEXT), rig.engine("d1", "decode", TEXT)
    await rig.start(leaving, staying)
    rig.announce_endpoints(
        msgspec.structs.replace(leaving.endpoint, draining=True), staying.endpoint
    )
    await rig.connected(staying)
    for _ in range(6):
        assert await rig.complete() == TEXT
    assert not leaving.adds
    rig.announce(leaving, staying)
    await rig.connected(leaving, staying)


async def test_a_restarted_engine_is_reconnected(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    await rig.start(engine)
    engine.die()
    await rig.connected()
    status, body, _ = await rig.post("/v1/completions", {"model": "m", "prompt": "go"})
    assert (status, body["error"]["code"]) == (503, "no_ready_engine")
    assert (await rig.get("/ready"))[0] == 200  # a client that triggers it
    successor = rig.engine("d", "decode", TEXT, port=engine.port)
    await rig.connected(successor)
    assert await rig.complete() == TEXT


async def test_the_pool_connects_to_an_engine_that_starts_later(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", TEXT)
    engine.die()
    rig.announce(engine)
    port = await rig.gateway.start("127.0.0.1")
    rig.url = f"http://127.0.0.1:{port}"
    late = rig.engine("d", "decode", TEXT, port=engine.port)
    await rig.connected(late)


async def test_requests_are_sent_to_the_least_loaded_engine(rig: GatewayRig) -> None:
    engines = [rig.engine(f"d{i}", "decode", TEXT, hold_after=0) for i in range(3)]
    await rig.start(*engines)
    running = [asyncio.create_task(rig.complete()) for _ in range(9)]
    await until(
        lambda: sum(len(engine.adds) for engine in engines) == 9, "nine requests at the engines"
    )
    assert [len(engine.adds) for engine in engines] == [3, 3, 3]
    for engine in engines:
        engine.released.set()
    assert await asyncio.gather(*running) == [TEXT] * 9


async def test_an_invalid_discovery_file_keeps_the_last_engines(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(file_discovery, "FILE_POLL_S", 0.01)
    path = tmp_path / "engines.json"
    sets = FileDiscovery(path).watch()
    first = asyncio.create_task(anext(sets))
    path.write_text('{"engines": [{"name": "a", "role": "decode", "host": "127.0.0.9"}]}')
    [endpoint] = await asyncio.wait_for(first, 60)
    assert (endpoint.name, endpoint.engine_port, endpoint.kv_port) == ("a", 5557, 5558)
    second = asyncio.create_task(anext(sets))
    for broken in ('{"engines": [', '{"engines": [{"name": "a"}]}'):
        path.write_text(broken)
        done, _ = await asyncio.wait([second], timeout=0.1)
        assert not done
    path.write_text('{"engines": []}')
    assert await asyncio.wait_for(second, 60) == []
    await sets.aclose()


def test_invalid_discovery_files_are_refused() -> None:
    for content in (
        b'{"engines": [{"name": "a", "role": "both", "host": "x"}]}',
        b'{"engines": [{"name": "a", "role": "decode", "host": "x"}, '
        b'{"name": "a", "role": "decode", "host": "y"}]}',
        b"[]",
    ):
        with pytest.raises(ValueError, match=r"role|unique|engines"):
            parse_endpoints(content)


def pod(**changes: object) -> dict[str, object]:
    labels = {"serving.baton.dev/role": "decode"}
    return {
        "metadata": {"name": "demo-decode-0", "labels": labels, **changes.pop("metadata", {})},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.7",
            "conditions": [{"type": "Ready", "status": "True"}],
            **changes,
        },
    }


def test_a_running_ready_pod_with_an_address_is_an_endpoint() -> None:
    endpoint = endpoint_of(pod())
    assert (endpoint.name, endpoint.role, endpoint.host, endpoint.draining) == (
        "demo-decode-0",
        "decode",
        "10.0.0.7",
        False,
    )
    for broken in (
        pod(phase="Pending"),
        pod(podIP=None),
        pod(conditions=[{"type": "Ready", "status": "False"}]),
        pod(conditions=None),
        pod(metadata={"labels": {"serving.baton.dev/role": "gateway"}}),
        pod(metadata={"labels": None}),
    ):
        assert endpoint_of(broken) is None


def test_a_terminating_or_annotated_pod_is_draining() -> None:
    assert endpoint_of(pod(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})).draining
    assert endpoint_of(
        pod(metadata={"annotations": {"serving.baton.dev/draining": "true"}})
    ).draining
    assert not endpoint_of(
        pod(metadata={"annotations": {"serving.baton.dev/draining": "false"}})
    ).draining
