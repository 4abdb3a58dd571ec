"""The metrics of an engine in Prometheus' text format."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import generate_latest

from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.prometheus import engine_registry
from baton_engine.metrics.request_metrics import RequestMetrics
from baton_kv_transfer.connector import ConnectorStats, FailureReason


@pytest.fixture
def metrics() -> RequestMetrics:
    return RequestMetrics(lambda: 100.0)


def test_prometheus_gets_the_expected_names_and_labels(metrics) -> None:
    stats = EngineStats(num_requests_swapped=2, requests_finished={"stop": 3}, sleep_level=1)
    metrics.on_step(12, 99.0)
    text = generate_latest(engine_registry(lambda: stats, metrics, "m")).decode()
    for line in (
        'baton:num_requests_running{model_name="m"} 0.0',
        'baton:num_requests_swapped{model_name="m"} 2.0',
        'baton:kv_cache_usage_perc{model_name="m"} 0.0',
        'baton:request_success_total{finished_reason="stop",model_name="m"} 3.0',
        'baton:engine_sleep_state{model_name="m",sleep_state="awake"} 0.0',
        'baton:engine_sleep_state{model_name="m",sleep_state="weights_offloaded"} 1.0',
        'baton:iteration_tokens_total_bucket{le="8.0",model_name="m"} 0.0',
        'baton:iteration_tokens_total_bucket{le="16.0",model_name="m"} 1.0',
        'baton:iteration_tokens_total_sum{model_name="m"} 12.0',
        'baton:busy_seconds_total{model_name="m"} 1.0',
        'baton:time_to_first_token_seconds_count{model_name="m"} 0.0',
    ):
        assert line in text, f"{line} is not in\n{text}"


def test_every_connector_statistic_is_a_metric_and_failures_are_labelled_by_reason(metrics) -> None:
    counted = ConnectorStats(bytes_moved={"ucx tcp/eth0": 5, "ucx rc_mlx5/mlx5_0:1": 6})
    for number, field in enumerate(msgspec.structs.fields(ConnectorStats)):
        if field.type in (int, float):
            setattr(counted, field.name, number + 100)
    counted.count_failure(FailureReason.CHECKSUM)
    stats = EngineStats(kv_transfer=counted, kv_transfer_recomputed_tokens=7)
    text = generate_latest(engine_registry(lambda: stats, metrics, "m")).decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for field in msgspec.structs.fields(ConnectorStats):
        if field.type in (int, float):
            suffix = "" if field.name in ("queued_bytes", "inflight_bytes") else "_total"
            value = samples[f'baton:kv_transfer_{field.name}{suffix}{{model_name="m"}}']
            assert float(value) == getattr(counted, field.name)
    for lane, count in (("tcp/eth0", 5), ("rc_mlx5/mlx5_0:1", 6)):
        name = f'baton:kv_transfer_bytes_total{{lane="{lane}",model_name="m",transport="ucx"}}'
        assert float(samples[name]) == count
    for reason, count in (("checksum", 1), ("peer_lost", 0)):
        labels = f'{{model_name="m",reason="{reason}"}}'
        assert float(samples[f"baton:kv_transfer_transfers_failed_total{labels}"]) == count
    assert float(samples['baton:kv_transfer_recomputed_tokens_total{model_name="m"}']) == 7
    assert float(samples['baton:kv_transfer_up{model_name="m"}']) == 1
