"""Request metrics: latencies, lengths and busy time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton_engine.metrics.request_metrics import Histogram, RequestMetrics
from baton_protocol.engine_messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from baton_protocol.sampling_params import SamplingParams


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> RequestMetrics:
    return RequestMetrics(clock)


def observed(metrics: RequestMetrics, name: str) -> tuple[int, float]:
    """Return the count and the sum of a histogram."""
    histogram = metrics.histograms[name]
    return histogram.cumulative()[-1][1], pytest.approx(histogram.sum)  # type: ignore[return-value]


def test_a_finished_request_is_observed_in_every_latency_and_length_histogram(
    metrics, clock
) -> None:
    metrics.on_add(EngineCoreRequest("r", [1] * 30, SamplingParams(max_tokens=3)))
    scheduled = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 102.0)
    again = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 104.5)
    clock.now = 105.0
    metrics.on_outputs([EngineCoreOutput("r", [7], events=[scheduled, again])])
    clock.now = 106.0
    metrics.on_outputs([EngineCoreOutput("r", [8])])
    clock.now = 106.5
    metrics.on_outputs([EngineCoreOutput("r", [9], finish_reason=FinishReason.LENGTH)])
    seen = {name: observed(metrics, name) for name in metrics.histograms}
    assert seen == {
        "time_to_first_token_seconds": (1, 5.0),
        "inter_token_latency_seconds": (2, 1.5),
        "e2e_request_latency_seconds": (1, 6.5),
        "request_queue_time_seconds": (1, 2.0),
        "request_prefill_time_seconds": (1, 3.0),
        "request_decode_time_seconds": (1, 1.5),
        "request_inference_time_seconds": (1, 4.5),
        "request_prompt_tokens": (1, 30.0),
        "request_generation_tokens": (1, 3.0),
        "request_params_max_tokens": (1, 3.0),
        "iteration_tokens_total": (0, 0.0),
    }


def test_tokens_of_one_output_share_the_time_since_the_previous_token(metrics, clock) -> None:
    metrics.on_add(EngineCoreRequest("r", [1], SamplingParams()))
    metrics.on_outputs([EngineCoreOutput("r", [7])])
    clock.now += 0.75
    metrics.on_outputs([EngineCoreOutput("r", [8, 9, 10])])
    assert observed(metrics, "inter_token_latency_seconds") == (3, 0.75)
    buckets = metrics.histograms["inter_token_latency_seconds"].cumulative()
    assert next(count for bound, count in buckets if bound >= 0.25) == 3


def test_aborted_requests_are_not_in_the_end_to_end_latency(metrics) -> None:
    metrics.on_add(EngineCoreRequest("r", [1], SamplingParams()))
    metrics.on_outputs([EngineCoreOutput("r", [], finish_reason=FinishReason.ABORT)])
    assert observed(metrics, "e2e_request_latency_seconds") == (0, 0.0)
    # The id can be used again.
    metrics.on_add(EngineCoreRequest("r", [1], SamplingParams()))


def test_a_bucket_includes_its_upper_bound() -> None:
    histogram = Histogram("text", [1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (float("inf"), 4)]


def test_busy_time_counts_overlapping_steps_once_and_steps_without_tokens_not_at_all(
    metrics, clock
) -> None:
    clock.now = 103.0
    metrics.on_step(5, started=101.0)
    clock.now = 104.0
    metrics.on_step(5, started=102.0)  # began during the previous step
    clock.now = 110.0
    metrics.on_step(0, started=105.0)
    metrics.on_step(5, started=109.5)
    assert metrics.busy_s == pytest.approx(3.5)


@pytest.mark.parametrize("name", ["time_to_first_token_seconds", "inter_token_latency_seconds"])
def test_buckets_of_latencies_with_targets_are_at_most_a_quarter_apart(metrics, name) -> None:
    bounds = [bound for bound, _ in metrics.histograms[name].cumulative() if 0.005 <= bound <= 5.0]
    assert all(after <= 1.26 * before for before, after in pairwise(bounds))
