"""EngineStats and RequestMetrics as Prometheus metrics, named as vLLM's with our prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton_engine.core.request_metrics import RequestMetrics
from baton_engine.core.stats import EngineStats

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to run, those waiting for remote KV included.",
    "num_requests_swapped": "Preempted requests whose KV blocks are in host memory.",
    "num_requests_waiting_for_remote_kv": "Requests whose prompt is computed by a prefill engine.",
    "num_transfers_held": "Transfers of ended requests whose blocks are still in use.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that started.",
    "prompt_tokens_computed": "Prompt tokens run through the model in this engine.",
    "prompt_tokens_remote": "Prompt tokens whose KV came from a prefill engine.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Tokens sampled.",
    "num_preemptions": "Requests preempted for lack of KV blocks.",
    "num_swapped_out_blocks": "KV blocks moved to host memory by preemptions.",
    "num_swapped_in_blocks": "KV blocks moved back from host memory.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
}
_TRANSFER_COUNTERS = {
    "blocks_sent": "KV blocks published to decode engines.",
    "blocks_received": "KV blocks fetched from prefill engines.",
    "bytes_received": "Bytes of KV fetched from prefill engines.",
    "transfers_completed": "KV transfers that ended well.",
    "transfers_failed": "KV transfers that did not.",
    "checksum_failures": "KV blocks that arrived wrong and were not used.",
    "leases_expired": "KV transfers given up because the consumer went silent.",
    "receive_seconds": "Time between the start and the end of KV loads, summed.",
}
_SLEEP_STATES = {None: "awake", 0: "paused", 1: "weights_offloaded", 2: "discard_all"}


class EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], requests: RequestMetrics, model_name: str) -> None:
        self._stats = stats
        self._requests = requests
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for field, text in _GAUGES.items():
            yield self._sample(GaugeMetricFamily(f"baton:{field}", text, labels=["model_name"]), getattr(stats, field))
        usage = GaugeMetricFamily("baton:kv_cache_usage_perc", "KV blocks in use, 1 is all.", labels=["model_name"])
        yield self._sample(usage, stats.kv_cache_usage)
        for field, text in _COUNTERS.items():
            yield self._sample(
                CounterMetricFamily(f"baton:{field}", text, labels=["model_name"]), getattr(stats, field)
            )
        finished = CounterMetricFamily(
            "baton:request_success", "Ended requests.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.requests_finished.items():
            finished.add_metric([*self._labels.values(), reason], count)
        yield finished
        sleep = GaugeMetricFamily(
            "baton:engine_sleep_state", "1 for the state the engine is in.", labels=["model_name", "sleep_state"]
        )
        for level, state in _SLEEP_STATES.items():
            sleep.add_metric([*self._labels.values(), state], float(stats.sleep_level == level))
        yield sleep
        for name, histogram in self._requests.histograms.items():
            buckets = [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
            family = HistogramMetricFamily(f"baton:{name}", histogram.text, labels=["model_name"])
            family.add_metric(list(self._labels.values()), buckets, sum_value=histogram.sum)
            yield family
        if stats.kv_transfer is not None:
            for field, text in _TRANSFER_COUNTERS.items():
                counter = CounterMetricFamily(f"baton:kv_transfer_{field}", text, labels=["model_name"])
                yield self._sample(counter, getattr(stats.kv_transfer, field))

    def _sample(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), value)
        return family


def engine_registry(stats: Callable[[], EngineStats], requests: RequestMetrics, model_name: str) -> CollectorRegistry:
    """A registry of its own: nothing else in the process adds to it."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats, requests, model_name))
    return registry
