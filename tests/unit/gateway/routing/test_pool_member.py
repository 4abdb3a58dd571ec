"""The availability and the load of one engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton_gateway.routing.pool_member import SLOW_AFTER_S, PoolMember
from baton_protocol.engine_client.engine_client import EngineClient
from baton_protocol.options.config import EngineEndpoint


def member(*, draining: bool = False, **fields: Any) -> PoolMember:
    one = PoolMember(EngineEndpoint(name="d", role="decode", host="127.0.0.1", draining=draining))
    client = {"accepts_requests": True, "num_requests": 0, "status": None, **fields}
    one.client = cast(EngineClient, SimpleNamespace(**client))
    return one


def status(stalled_s: float = 0.0, usage: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(stalled_s=stalled_s, kv_cache_usage=usage)


@pytest.mark.parametrize(
    ("one", "is_available"),
    [
        (member(), True),
        (member(draining=True), False),
        (member(accepts_requests=False), False),
        (PoolMember(EngineEndpoint(name="d", role="decode", host="127.0.0.1")), False),
    ],
)
def test_an_engine_is_available_if_it_is_connected_and_accepts_requests(
    one: PoolMember, is_available: bool
) -> None:
    assert one.is_available == is_available
    one.leave()
    assert not one.is_available


def test_the_load_orders_engines_by_slowness_then_requests_then_kv_usage() -> None:
    ordered = [
        member(num_requests=1),
        member(num_requests=1, status=status(usage=0.5)),
        member(num_requests=2, status=status(stalled_s=SLOW_AFTER_S)),
        member(status=status(stalled_s=SLOW_AFTER_S + 0.1)),
    ]
    keys = [each.load() for each in ordered]
    assert keys == sorted(keys)
    assert [each.is_slow for each in ordered] == [False, False, False, True]
