"""The delays of clients that guess API keys."""

from __future__ import annotations

from baton_gateway.access import auth_delays
from baton_gateway.access.auth_delays import AuthDelays


def test_refusals_are_forgotten_and_their_table_is_bounded() -> None:
    now = 1000.0
    table = AuthDelays(lambda: now)

    def num_at_once(address: str) -> int:
        return next(count for count in range(100) if table.record(address))

    assert num_at_once("10.0.0.1") == auth_delays.BURST
    assert num_at_once("10.0.0.2") == auth_delays.BURST
    assert num_at_once("10.0.0.1") == 0
    now += auth_delays.REFILL_S
    assert num_at_once("10.0.0.1") == 1
    now += auth_delays.BURST * auth_delays.REFILL_S
    assert num_at_once("10.0.0.1") == auth_delays.BURST
    # The addresses of one IPv6 network count as one.
    assert num_at_once("2001:db8::1") == auth_delays.BURST
    assert num_at_once("2001:db8::ffff") == 0
    assert num_at_once("2001:db8:0:1::1") == auth_delays.BURST
    assert table.record(None) == 0
    for number in range(auth_delays.MAX_ADDRESSES + 10):
        table.record(f"host-{number}")
    assert len(table._forgotten_at) == auth_delays.MAX_ADDRESSES
