"""Reports of expert loads: invalid ones are left out."""

from __future__ import annotations

from baton_engine.elastic.coordinator.placement.balance import fits
from baton_protocol.topology import ExpertLoads


def test_a_report_with_negative_loads_is_left_out() -> None:
    assert fits(ExpertLoads(((0, 1),)), [2])
    assert not fits(ExpertLoads(((0, -1),)), [2])
