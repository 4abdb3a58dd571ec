"""Measurements from scrapes: real exporters, quantiles, restarts, and pods that start and leave."""

from __future__ import annotations

import time
from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.prometheus import engine_registry
from baton_engine.metrics.request_metrics import RequestMetrics
from baton_gateway.metrics import GatewayMetrics
from baton_operator.autoscale import windows
from baton_operator.autoscale.windows import (
    CumulativeHistogram,
    ScrapedSample,
    Snapshot,
    Window,
    sample,
    window,
)


def engine(
    *, ttft: int = 0, prefill_s: float = 0.0, running: int = 0, waiting: int = 0, kv: float = 0.0
) -> ScrapedSample:
    """Return the metrics of a prefill engine.

    It had `ttft` first tokens of 0.3 s and computed prompts for `prefill_s`.
    """
    return ScrapedSample(
        "prefill",
        {
            windows.RUNNING: running,
            windows.WAITING: waiting,
            windows.WAITING_FOR_REMOTE_KV: 0,
            windows.KV_USAGE: kv,
        },
        {
            windows.TTFT: CumulativeHistogram({0.2: 0, 0.4: ttft, inf: ttft}, 0.3 * ttft),
            windows.PREFILL_TIME: CumulativeHistogram({0.4: ttft, inf: ttft}, prefill_s),
        },
    )


def measured(*snapshots: tuple[float, dict[str, ScrapedSample]], start: float = 0.0) -> Window:
    result = window(
        [Snapshot(at, samples) for at, samples in snapshots],
        start=start,
        fresh_s=40.0,
        quantile=0.95,
    )
    assert result is not None
    return result


def test_metrics_of_an_engine_are_parsed() -> None:
    stats = EngineStats(
        num_requests_running=3,
        num_requests_waiting=5,
        num_requests_waiting_for_remote_kv=2,
        kv_cache_usage=0.25,
    )
    requests = RequestMetrics()
    for name, value in (
        ("time_to_first_token", 0.3),
        ("inter_token_latency", 0.02),
        ("request_prefill_time", 0.4),
    ):
        requests.histograms[f"{name}_seconds"].observe(value, 2)
    requests.on_step(8, started=time.monotonic() - 3.0)
    read = sample("decode", generate_latest(engine_registry(lambda: stats, requests, "m")).decode())
    assert read.busy_s == pytest.approx(3.0, abs=0.5)
    assert read.gauges == {
        windows.RUNNING: 3,
        windows.WAITING: 5,
        windows.WAITING_FOR_REMOTE_KV: 2,
        windows.KV_USAGE: 0.25,
    }
    assert set(read.histograms) == set(windows.ENGINE_HISTOGRAMS)
    assert read.histograms[windows.TTFT].count == 2
    assert read.histograms[windows.TTFT].mean == pytest.approx(0.3)
    assert read.histograms[windows.ITL].quantile(0.5) == pytest.approx(0.02, rel=0.1)
    assert read.histograms[windows.QUEUE_TIME].quantile(0.5) is None


def test_metrics_of_a_gateway_are_parsed() -> None:
    metrics = GatewayMetrics()
    metrics.in_flight.set(4)
    metrics.held.set(2)
    for endpoint, status, times in (
        ("/v1/completions", "200", 2),
        ("/v1/chat/completions", "503", 1),
        ("/v1/chat/completions", "404", 5),
        ("/v1/completions", "401", 5),
        ("/health", "200", 9),
    ):
        metrics.requests.labels(endpoint, status).inc(times)
    read = sample(None, metrics.text.get().decode())
    assert (read.gauges[windows.IN_FLIGHT], read.gauges[windows.HELD], read.requests) == (4, 2, 3)


def test_invalid_metrics_are_an_error() -> None:
    with pytest.raises(ValueError, match="no metric of an engine or a gateway"):
        sample("decode", "<html>502</html> oops\n")
    with pytest.raises(ValueError, match=r"could not convert|invalid"):
        sample("decode", "baton:kv_cache_usage_perc oops\n")
    with pytest.raises(ValueError, match="is nan"):
        sample("decode", "# TYPE baton:kv_cache_usage_perc gauge\nbaton:kv_cache_usage_perc NaN\n")


def test_scrapes_that_would_take_long_are_an_error() -> None:
    name = windows.RUNNING
    quotes = '\\"' * windows.MAX_LINE_LENGTH
    with pytest.raises(ValueError, match="a line has more than"):
        sample("decode", f'{name}{{a="{quotes}"}} 1\n')
    with pytest.raises(ValueError, match="its metrics have more than"):
        sample("decode", f"{name} 1\n" * (windows.MAX_PARSED_LENGTH // len(name)))
    buckets = "".join(
        f'{windows.TTFT}_bucket{{le="{number}"}} 1\n' for number in range(windows.MAX_BUCKETS + 1)
    )
    with pytest.raises(ValueError, match=f"more than {windows.MAX_BUCKETS} buckets"):
        sample("decode", f"# TYPE {windows.TTFT} histogram\n{buckets}")


def test_histograms_with_too_many_buckets_together_are_an_error() -> None:
    first, second = (
        CumulativeHistogram({float(number): 1.0 for number in range(start, start + 100)})
        for start in (0, 100)
    )
    assert len((first + first).buckets) == 100
    with pytest.raises(ValueError, match="the histograms of all pods have more than"):
        first + second


def test_lines_of_other_metrics_are_not_limited() -> None:
    other = f"{windows.RUNNING}_other 1\n# HELP x {'x' * 10_000}\n" * 1000
    read = sample("decode", f"{other}{windows.RUNNING} 3\n")
    assert read.gauges == {windows.RUNNING: 3}


def test_quantiles_are_interpolated_and_end_at_the_last_finite_bound() -> None:
    histogram = CumulativeHistogram({0.1: 0, 0.2: 50, 0.4: 90, inf: 100}, 0)
    assert histogram.quantile(0.25) == pytest.approx(0.15)
    assert histogram.quantile(0.7) == pytest.approx(0.3)
    assert histogram.quantile(0.99) == 0.4


@given(st.lists(st.floats(0.001, 9.0), min_size=1), st.floats(0.05, 0.95))
def test_a_quantile_is_in_the_same_bucket_as_the_exact_one(values: list[float], q: float) -> None:
    bounds = [0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0]
    histogram = CumulativeHistogram(
        {b: sum(v <= b for v in values) for b in bounds} | {inf: len(values)}, sum(values)
    )
    true = sorted(values)[max(0, -int(-q * len(values) // 1) - 1)]
    upper = min(b for b in bounds if true <= b)
    lower = max((b for b in bounds if b < true), default=0.0)
    estimate = histogram.quantile(q)
    assert estimate is not None
    assert lower <= estimate <= upper * (1 + 1e-9)


def test_only_differences_between_scrapes_count() -> None:
    result = measured(
        (0, {"a": engine(ttft=100, prefill_s=30)}),
        (60, {"a": engine(ttft=160, prefill_s=60, kv=0.5)}),
    )
    role = result.roles["prefill"]
    assert (role.engines, role.first_tokens, role.requests_per_s) == (1, 60, 1.0)
    assert role.busy == pytest.approx(0.5)
    assert role.prefill_s == pytest.approx(0.5)
    assert role.kv_usage == 0.25


def test_concurrent_prompts_keep_an_engine_busy_only_once() -> None:
    after = {"a": engine(ttft=9, prefill_s=90), "b": engine(ttft=3, prefill_s=30)}
    result = measured((0, {"a": engine(), "b": engine()}), (60, after))
    assert result.roles["prefill"].busy == pytest.approx(0.75)


def test_counters_restart_at_zero_after_a_restart_of_the_container_or_the_pod() -> None:
    for name in ("a/0", "a/1"):
        after = {name: engine(ttft=7, prefill_s=3)}
        later = {name: engine(ttft=20, prefill_s=9)}
        result = measured((0, {"a/0": engine(ttft=1000, prefill_s=500)}), (30, after), (60, later))
        # The first scrape of a new container is a starting point. A decreased counter restarted
        # at zero.
        assert result.roles["prefill"].first_tokens == (20 if name == "a/0" else 13)


def test_pods_may_start_and_leave_within_a_window() -> None:
    result = measured(
        (0, {"gone": engine(), "stays": engine()}),
        (15, {"gone": engine(ttft=30), "stays": engine(ttft=10)}),
        (60, {"stays": engine(ttft=20), "new": engine(ttft=500)}),
        (75, {"stays": engine(ttft=30), "new": engine(ttft=510)}),
    )
    assert result.roles["prefill"].engines == 2
    assert result.roles["prefill"].first_tokens == 30 + 30 + 10


def test_one_scrape_of_a_pod_measures_nothing() -> None:
    result = measured((0, {"a": engine()}), (15, {"a": engine(), "b": engine(ttft=9)}))
    assert (result.roles["prefill"].engines, result.roles["prefill"].ttft_s) == (1, None)
    assert result.roles["decode"].engines == 0
    assert window([Snapshot(0, {"a": engine()})], start=0, fresh_s=40, quantile=0.95) is None


def test_scrapes_before_the_window_are_ignored() -> None:
    result = measured(
        (0, {"a": engine()}), (60, {"a": engine(ttft=50)}), (90, {"a": engine(ttft=53)}), start=60
    )
    assert (result.start, result.roles["prefill"].first_tokens) == (60, 3)


def test_requests_waiting_for_remote_kv_do_not_count_as_queued() -> None:
    def decode(waiting: int, remote: int) -> ScrapedSample:
        return ScrapedSample(
            "decode", {windows.WAITING: waiting, windows.WAITING_FOR_REMOTE_KV: remote}, {}
        )

    result = measured((0, {"a": decode(4, 4)}), (10, {"a": decode(12, 6)}))
    assert result.roles["decode"].waiting == 3
    assert result.roles["decode"].waiting_growth_per_s == pytest.approx(0.6)


def test_demand_is_measured_at_the_gateways() -> None:
    def gateway(requests: float, in_flight: float) -> ScrapedSample:
        return ScrapedSample(None, {windows.IN_FLIGHT: in_flight}, {}, requests)

    result = measured(
        (0, {"g": gateway(10, 0), "h": gateway(5, 9)}),
        (60, {"g": gateway(40, 2), "h": gateway(5, 1)}),
    )
    assert (result.gateways, result.in_flight, result.answered_at) == (2, 3, 60)


@given(
    st.randoms(use_true_random=False),
    st.lists(st.tuples(st.integers(0, 99), st.floats(0, 15)), min_size=2, max_size=8),
)
def test_the_order_of_pods_and_scrapes_does_not_matter(
    random: Random, pods: list[tuple[int, float]]
) -> None:
    first = {f"p{i}": engine() for i in range(len(pods))}
    second = {
        f"p{i}": engine(ttft=n, prefill_s=s, waiting=n, kv=s / 15) for i, (n, s) in enumerate(pods)
    }
    snapshots = [Snapshot(0, first), Snapshot(15, second)]
    names = list(first)
    random.shuffle(names)
    shuffled = [
        Snapshot(s.at, {name: s.samples[name] for name in names}) for s in reversed(snapshots)
    ]
    arguments = {"start": 0.0, "fresh_s": 40.0, "quantile": 0.95}
    assert window(snapshots, **arguments) == window(shuffled, **arguments)
    renamed = [Snapshot(s.at, dict(zip(names, s.samples.values(), strict=True))) for s in snapshots]
    one, other = window(snapshots, **arguments), window(renamed, **arguments)
    assert other.roles["prefill"].busy == one.roles["prefill"].busy
    assert other.roles["prefill"].ttft_s == one.roles["prefill"].ttft_s


def test_the_busy_time_of_an_engine_is_used_and_restarts_at_zero() -> None:
    def counted(busy_s: float, first_tokens: int) -> ScrapedSample:
        return msgspec.structs.replace(engine(ttft=first_tokens, prefill_s=30.0), busy_s=busy_s)

    on = measured((0.0, {"p/0": counted(100.0, 50)}), (10.0, {"p/0": counted(104.0, 60)}))
    assert on.roles["prefill"].busy == pytest.approx(0.4)
    restarted = measured((0.0, {"p/0": counted(100.0, 50)}), (10.0, {"p/0": counted(3.0, 5)}))
    assert restarted.roles["prefill"].busy == pytest.approx(0.3)


def test_a_window_has_the_times_of_the_last_request_and_of_its_response() -> None:
    def gateway(in_flight: float, requests: float, held: float = 0.0) -> ScrapedSample:
        return ScrapedSample(None, {windows.IN_FLIGHT: in_flight, windows.HELD: held}, {}, requests)

    quiet = measured(*((at, {"g/0": gateway(0, 7)}) for at in (0.0, 2.0, 4.0)))
    assert (quiet.held, quiet.answered_at, quiet.active_at) == (0, None, None)
    seen = measured(
        (0.0, {"g/0": gateway(0, 7)}),
        (2.0, {"g/0": gateway(0, 8)}),
        (4.0, {"g/0": gateway(1, 8, held=1)}),
        (6.0, {"g/0": gateway(0, 8)}),
    )
    assert (seen.held, seen.answered_at, seen.active_at) == (0, 2.0, 4.0)
