"""The comparison of applied objects with stored ones."""

from __future__ import annotations

from baton_operator.reconcile.apply import contains


def test_contains_ignores_added_fields_and_detects_missing_ones() -> None:
    wanted = {"spec": {"ports": [{"port": 80}]}}
    assert contains(
        {"spec": {"ports": [{"port": 80, "nodePort": 1}], "x": 1}, "status": {}}, wanted
    )
    assert not contains({"spec": {"ports": [{"port": 81}]}}, wanted)
    assert not contains({"spec": {"ports": [{"port": 80}, {"port": 81}]}}, wanted)
