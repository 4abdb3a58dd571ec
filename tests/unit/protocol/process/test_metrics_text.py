"""The text of metrics for a port that clients flood."""

from __future__ import annotations

from unittest import mock

from prometheus_client import CollectorRegistry, Gauge

from baton_protocol.process import metrics_text
from baton_protocol.process.metrics_text import MAX_PER_S, MetricsText


def test_a_flood_gets_the_last_text_and_a_new_one_later() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("requests", "Requests.", registry=registry)
    with mock.patch.object(metrics_text, "monotonic", return_value=100.0) as clock:
        text = MetricsText(registry)
        for number in range(2 * MAX_PER_S):
            gauge.set(number)
            assert f"requests {min(number, MAX_PER_S - 1)}.0".encode() in text.get()
        clock.return_value += 1.5 / MAX_PER_S
        for _ in range(2):
            assert f"requests {2 * MAX_PER_S - 1}.0".encode() in text.get()
            gauge.set(0)
