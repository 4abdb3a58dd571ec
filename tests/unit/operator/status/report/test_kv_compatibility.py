"""Prefill and decode pods that cannot exchange KV blocks: the probes and the condition."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from baton_kube.client import Object
from baton_operator.names import Key
from baton_operator.status.report import report
from baton_operator.status.report_events import new_failures
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.status_probes import StatusProbes
from baton_protocol.kv_compatibility import KVCompatibility, differences
from baton_protocol.process.health import Health
from support.http_server import serving
from support.operator.services import NOW, observed, pod, resolved, service

KEY = Key("default", "demo")
KV = KVCompatibility(
    version=2, checkpoint="c0ffee", dtype="float32", quantization="none", layout="NHL2BD",
    block_size=16,
    num_layers=2, num_kv_heads=4, head_dim=8, transport="ucx",
)  # fmt: skip
LARGE_BLOCKS = msgspec.structs.replace(KV, block_size=32)


def group(role: Any, *pods: Object, desired: int | None = None) -> ReportedGroup:
    return ReportedGroup(
        role=role,
        desired=len(pods) if desired is None else desired,
        pods=list(pods),
        revision="new",
    )


def of(role: str, ordinal: int, **options: Any) -> Object:
    return pod(f"demo-{role}-{ordinal}", **{"ready": True, **options})


def reported(
    prefill: ReportedGroup, decode: ReportedGroup, kv: dict[str, KVCompatibility], **spec: Any
) -> Any:
    gateway = ReportedGroup(role="gateway", desired=1, pods=[pod("demo-gateway", ready=True)])
    groups: dict[Any, ReportedGroup] = {"prefill": prefill, "decode": decode, "gateway": gateway}
    return report(
        observed(kv=kv),
        resolved(**spec),
        groups,
        problem=None,
        now=NOW,
    )


def condition(status: Any, type_: str) -> tuple[str, str, str]:
    (found,) = [each for each in status.conditions if each.type == type_]
    return found.status, found.reason, found.message


def test_compatible_pods_do_not_affect_conditions() -> None:
    status = reported(
        group("prefill", of("prefill", 0)),
        group("decode", of("decode", 0)),
        dict.fromkeys(PAIR, KV),
    )
    assert condition(status, "Ready")[:2] == ("True", "AllGroupsReady")


PAIR = ("demo-prefill-0", "demo-decode-0")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("block_size", 32, "block_size is 16 at demo-prefill-0 and 32 at demo-decode-0"),
        ("dtype", "bfloat16", "dtype is float32 at demo-prefill-0 and bfloat16 at demo-decode-0"),
        ("checkpoint", "abc", "checkpoint is c0ffee at demo-prefill-0 and abc at demo-decode-0"),
        ("version", 3, "version is 2 at demo-prefill-0 and 3 at demo-decode-0"),
    ],
)
def test_prefill_is_not_ready_when_decode_cannot_take_its_blocks(
    field: str, value: Any, text: str
) -> None:
    other = msgspec.structs.replace(KV, **{field: value})
    kv = {"demo-prefill-0": KV, "demo-decode-0": other}
    status = reported(group("prefill", of("prefill", 0)), group("decode", of("decode", 0)), kv)
    for type_ in ("PrefillReady", "Ready"):
        assert condition(status, type_)[:2] == ("False", "IncompatiblePeers")
        assert text in condition(status, type_)[2]
    assert "decode pods compute the prompts" in condition(status, "PrefillReady")[2]
    assert "1 of 1 prefill pods are ready" in condition(status, "PrefillReady")[2]
    assert condition(status, "DecodeReady")[:2] == ("True", "PodsReady"), (
        "decode must be ready, because requests succeed"
    )
    assert [each.reason for each in new_failures(service(), status)] == ["IncompatiblePeers"]


def test_a_pod_without_a_compatible_peer_is_named() -> None:
    pods = [of("decode", 0), of("decode", 1)]
    kv = {"demo-prefill-0": KV, "demo-decode-0": KV, "demo-decode-1": LARGE_BLOCKS}
    message = condition(
        reported(group("prefill", of("prefill", 0)), group("decode", *pods), kv), "PrefillReady"
    )[2]
    assert "1 of 2 decode pods cannot receive KV blocks from any prefill pod" in message
    assert "block_size is 32 at demo-decode-1 and 16 at demo-prefill-0" in message


def test_one_compatible_peer_per_pod_is_enough() -> None:
    kv = {
        "demo-prefill-0": KV,
        "demo-prefill-1": LARGE_BLOCKS,
        "demo-decode-0": KV,
        "demo-decode-1": LARGE_BLOCKS,
    }
    prefill = group("prefill", of("prefill", 0), of("prefill", 1))
    status = reported(prefill, group("decode", of("decode", 0), of("decode", 1)), kv)
    assert condition(status, "Ready")[0] == "True"


@pytest.mark.parametrize("known", [{}, {"demo-prefill-0": KV}, {"demo-decode-0": LARGE_BLOCKS}])
def test_pods_without_a_report_are_not_compared(known: dict[str, KVCompatibility]) -> None:
    status = reported(group("prefill", of("prefill", 0)), group("decode", of("decode", 0)), known)
    assert condition(status, "Ready")[0] == "True"


def test_incompatible_revisions_are_not_reported_during_a_rollout() -> None:
    prefill = group("prefill", of("prefill", 0))
    decode = group(
        "decode", of("decode", 0, revision="old"), of("decode", 1, ready=False), desired=1
    )
    kv = {"demo-prefill-0": LARGE_BLOCKS, "demo-decode-0": KV}
    status = reported(prefill, decode, kv)
    assert condition(status, "Updating")[0] == "True"
    assert condition(status, "PrefillReady")[:2] == ("True", "PodsReady")


def test_incompatible_revisions_are_reported_when_the_rollout_stalls() -> None:
    kv = {"demo-prefill-0": LARGE_BLOCKS, "demo-decode-0": KV}
    prefill, old = group("prefill", of("prefill", 0)), of("decode", 0, revision="old")
    paused = reported(prefill, group("decode", old, desired=1), kv, paused=True)
    assert condition(paused, "Updating")[1] == "Paused"
    assert condition(paused, "PrefillReady")[:2] == ("False", "IncompatiblePeers")
    late = of("decode", 1, ready=False)
    late["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    stalled = reported(prefill, group("decode", old, late, desired=1), kv)
    assert condition(stalled, "Updating")[1] == "RolloutStalled"
    assert condition(stalled, "PrefillReady")[:2] == ("False", "IncompatiblePeers")


def test_problems_that_keep_pods_from_serving_take_precedence() -> None:
    kv = {"demo-prefill-0": LARGE_BLOCKS, "demo-decode-0": KV}
    fatal = {
        "terminated": {"exitCode": 78, "message": "FATAL ModelNotFound: /models/x does not exist"}
    }
    broken = of("decode", 1, ready=False, state=fatal)
    status = reported(
        group("prefill", of("prefill", 0)), group("decode", of("decode", 0), broken), kv
    )
    assert condition(status, "PrefillReady")[1] == "IncompatiblePeers"
    assert condition(status, "Ready")[1] == "ModelNotFound"


def test_leaving_pods_and_groups_without_pods_are_ignored() -> None:
    kv = {"demo-prefill-0": LARGE_BLOCKS, "demo-decode-0": KV, "demo-decode-1": LARGE_BLOCKS}
    leaving = of("decode", 0, draining=True)
    decode = group("decode", of("decode", 1), leaving, desired=1)
    assert (
        condition(reported(group("prefill", of("prefill", 0)), decode, kv), "PrefillReady")[0]
        == "True"
    )
    asleep = group("decode", desired=0)
    assert (
        condition(reported(group("prefill", of("prefill", 0)), asleep, kv), "PrefillReady")[0]
        == "True"
    )


def test_a_difference_is_reported_with_both_values() -> None:
    assert differences(KV, KV, "here", "there") == ""
    other = msgspec.structs.replace(KV, block_size=32, dtype="bfloat16")
    assert differences(KV, other, "here", "there") == (
        "dtype is float32 at here and bfloat16 at there; block_size is 16 at here and 32 at there"
    )


class Engines:
    """Responds to GET /health at any address of 127.0.0.0/8."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.port = 0

    async def health(self, request: web.Request) -> web.Response:
        host = request.host.partition(":")[0]
        self.asked.append(host)
        return web.Response(body=self.answers.get(host, b"<html>"))


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    found = Engines()
    async with serving(web.get("/health", found.health), host="0.0.0.0") as found.port:
        yield found


def at(host: str, role: str, ordinal: int, **options: Any) -> Object:
    found = of(role, ordinal, status={"podIP": host}, **options)
    found["metadata"]["uid"] = f"uid-{role}-{ordinal}"
    found["metadata"]["labels"]["serving.baton.dev/role"] = role
    return found


def body(kv: KVCompatibility | None) -> bytes:
    return msgspec.json.encode(Health("Serving", "instance x", kv=kv))


async def test_each_serving_engine_is_probed_once(engines: Engines) -> None:
    engines.answers = {
        "127.0.0.1": body(KV),
        "127.0.0.2": body(None),
        "127.0.0.3": body(LARGE_BLOCKS),
    }
    pods = [
        at("127.0.0.1", "prefill", 0),
        at("127.0.0.2", "prefill", 1),
        at("127.0.0.3", "decode", 0),
        at("127.0.0.4", "decode", 1, ready=False),
        at("127.0.0.5", "gateway", 0),
    ]
    async with aiohttp.ClientSession() as session:
        peers = StatusProbes(session, engines.port)
        expected = {"demo-prefill-0": KV, "demo-decode-0": LARGE_BLOCKS}
        assert await peers.kv(KEY, pods) == expected
        assert await peers.kv(KEY, pods) == expected
        assert sorted(engines.asked) == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]

        restarted = at("127.0.0.3", "decode", 0, restarts=1)
        engines.answers["127.0.0.3"] = body(KV)
        assert await peers.kv(KEY, [pods[0], restarted]) == {
            "demo-prefill-0": KV,
            "demo-decode-0": KV,
        }
        assert engines.asked[3:] == ["127.0.0.3"], "only the new process must be probed"
        peers.forget(KEY)
        assert await peers.kv(KEY, pods[:1]) == {"demo-prefill-0": KV}
        assert engines.asked[4:] == ["127.0.0.1"]


async def test_an_unresponsive_engine_is_probed_again(engines: Engines) -> None:
    silent = at("127.0.0.1", "prefill", 0)
    async with aiohttp.ClientSession() as session:
        peers = StatusProbes(session, engines.port)
        assert await peers.kv(KEY, [silent]) == {}
        engines.answers["127.0.0.1"] = body(KV)
        assert await peers.kv(KEY, [silent]) == {"demo-prefill-0": KV}
