"""The stored history of decisions."""

from __future__ import annotations

import msgspec

from baton_operator.autoscale.decision_history import Breach, DecisionRun, History


def test_the_history_is_encoded_with_equal_recommendations_merged() -> None:
    history = History(breach=Breach(1.0, 2.0))
    for step in range(100):
        history = history.with_decision(15.0 * step, 3 if step < 85 else 4, keep_s=300, idle=1365.0)
    assert history.runs == (DecisionRun(3, 0.0, 1275.0), DecisionRun(4, 1275.0, 1485.0))
    assert history.covers(1500.0, 300)
    assert not history.covers(1485.0 + 121, 300)
    assert msgspec.json.decode(msgspec.json.encode(history), type=History) == history
