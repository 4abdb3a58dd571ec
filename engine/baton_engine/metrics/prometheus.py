"""EngineStats and RequestMetrics as Prometheus metrics, with vLLM's names and our prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.request_metrics import Histogram, RequestMetrics
from baton_engine.metrics.topology_stats import TopologyStats
from baton_kv_transfer.connector import ConnectorStats, FailureReason
from baton_protocol.topology import RankPhase

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to run, including those waiting for remote KV.",
    "num_requests_swapped": "Preempted requests whose KV blocks are in host memory.",
    "num_requests_waiting_for_remote_kv": "Requests whose prompt is computed by a prefill engine.",
    "num_transfers_held": "Transfers of ended requests whose blocks are still in use.",
    "offload_blocks": "Prefix blocks in the offload tier.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that started.",
    "prompt_tokens_computed": "Prompt tokens run through the model in this engine.",
    "prompt_tokens_remote": "Prompt tokens whose KV came from a prefill engine.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "kv_transfer_recomputed_tokens": "Tokens computed here for lack of a prefill engine's KV.",
    "generation_tokens": "Tokens sampled.",
    "num_preemptions": "Requests preempted for lack of KV blocks.",
    "num_swapped_out_blocks": "KV blocks moved to host memory by preemptions.",
    "num_swapped_in_blocks": "KV blocks moved back from host memory.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "offload_blocks_stored": "KV blocks copied to host memory when the prefix cache evicted them.",
    "offload_blocks_restored": "KV blocks copied back from host memory for a prefix.",
}
_TRANSFER_COUNTERS = {
    "blocks_sent": "KV blocks published to decode engines; with push also written to them.",
    "blocks_received": "KV blocks received from prefill engines and verified.",
    "bytes_sent": "Bytes of KV written to decode engines; 0 with pull, where decode engines read.",
    "bytes_received": "Bytes of KV received from prefill engines and verified.",
    "descriptors_posted": "Memory ranges posted to the transport, after merging.",
    "transfers_completed": "KV transfers completed, counted once per worker.",
    "checksum_failures": "KV blocks with a wrong checksum. They were not used.",
    "leases_expired": "KV transfers cancelled because the consumer stopped sending heartbeats.",
    "descriptors_refused": "Memory ranges that a peer requested without permission.",
    "handshakes_refused": "Handshakes refused: peers of another model, layout, release or service.",
    "memory_fences": "Times all peers were disconnected because one did not stop writing.",
    "receive_seconds": "Total time between the start and the end of KV loads.",
    "send_seconds": "Total time between the first and the last write of pushes.",
}
_TRANSFER_GAUGES = {
    "queued_bytes": "Bytes of KV that wait because a peer's window is full.",
    "inflight_bytes": "Bytes of KV in flight.",
}
_TOPOLOGY_GAUGES = {
    "generation": "Generation of the expert-parallel group that the rank is in. 0: none.",
    "rank": "The rank of this engine in its generation.",
    "size": "Ranks of the generation.",
    "wave": "The running wave, or the next one.",
    "wave_running": "1 while a wave runs: all ranks step together.",
}
_TOPOLOGY_COUNTERS = {
    "num_steps": "Steps run together with the other ranks.",
    "num_steps_without_tokens": "Dummy batches: steps that only ran experts for other ranks.",
    "num_broken": "Generations that lost a member while the rank was in them.",
    "exchange_seconds": "Total time in exchanges of votes, including waits for other ranks.",
}
_SLEEP_STATES = {None: "awake", 0: "paused", 1: "weights_offloaded", 2: "discard_all"}


class EngineCollector(Collector):
    """Reads the stats at each scrape."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        requests: RequestMetrics,
        model_name: str,
        commit_pauses: Mapping[str, Histogram],
    ) -> None:
        self._stats = stats
        self._requests = requests
        self._commit_pauses = commit_pauses
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for field, text in _GAUGES.items():
            yield self._sample(
                GaugeMetricFamily(f"baton:{field}", text, labels=["model_name"]),
                getattr(stats, field),
            )
        usage = GaugeMetricFamily(
            "baton:kv_cache_usage_perc",
            "Fraction of KV blocks in use, 0 to 1.",
            labels=["model_name"],
        )
        yield self._sample(usage, stats.kv_cache_usage)
        for field, text in _COUNTERS.items():
            yield self._sample(
                CounterMetricFamily(f"baton:{field}", text, labels=["model_name"]),
                getattr(stats, field),
            )
        busy = CounterMetricFamily(
            "baton:busy_seconds",
            "Seconds in which a step with tokens was in flight.",
            labels=["model_name"],
        )
        yield self._sample(busy, self._requests.busy_s)
        finished = CounterMetricFamily(
            "baton:request_success", "Ended requests.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.requests_finished.items():
            finished.add_metric([*self._labels.values(), reason], count)
        yield finished
        sleep = GaugeMetricFamily(
            "baton:engine_sleep_state",
            "1 for the state the engine is in.",
            labels=["model_name", "sleep_state"],
        )
        for level, state in _SLEEP_STATES.items():
            sleep.add_metric([*self._labels.values(), state], float(stats.sleep_level == level))
        yield sleep
        for name, histogram in self._requests.histograms.items():
            family = HistogramMetricFamily(f"baton:{name}", histogram.text, labels=["model_name"])
            family.add_metric(
                list(self._labels.values()), _buckets(histogram), sum_value=histogram.sum
            )
            yield family
        if stats.kv_transfer is not None:
            yield from self._transfers(stats.kv_transfer)
        if stats.topology is not None:
            yield from self._topology(stats.topology)

    def _transfers(self, stats: ConnectorStats) -> Iterator[Metric]:
        for field, text in _TRANSFER_COUNTERS.items():
            counter = CounterMetricFamily(f"baton:kv_transfer_{field}", text, labels=["model_name"])
            yield self._sample(counter, getattr(stats, field))
        for field, text in _TRANSFER_GAUGES.items():
            gauge = GaugeMetricFamily(f"baton:kv_transfer_{field}", text, labels=["model_name"])
            yield self._sample(gauge, getattr(stats, field))
        moved = CounterMetricFamily(
            "baton:kv_transfer_bytes",
            "Bytes of KV sent and received, by the transport that moved them and its lane.",
            labels=["model_name", "transport", "lane"],
        )
        for carrier, nbytes in stats.bytes_moved.items():
            moved.add_metric([*self._labels.values(), *carrier.split(" ", 1)], nbytes)
        yield moved
        failed = CounterMetricFamily(
            "baton:kv_transfer_transfers_failed",
            "KV transfers that did not transfer all their blocks, counted once per worker.",
            labels=["model_name", "reason"],
        )
        for reason in FailureReason:  # including those with 0: Prometheus rates need that sample
            failed.add_metric([*self._labels.values(), reason], stats.failures.get(reason, 0))
        yield failed
        works = GaugeMetricFamily(
            "baton:kv_transfer_up",
            "0 after the connector of a worker has failed.",
            labels=["model_name"],
        )
        yield self._sample(works, float(not stats.failure))

    def _topology(self, stats: TopologyStats) -> Iterator[Metric]:
        for field, text in _TOPOLOGY_GAUGES.items():
            gauge = GaugeMetricFamily(f"baton:topology_{field}", text, labels=["model_name"])
            yield self._sample(gauge, getattr(stats, field))
        for field, text in _TOPOLOGY_COUNTERS.items():
            counter = CounterMetricFamily(f"baton:topology_{field}", text, labels=["model_name"])
            yield self._sample(counter, getattr(stats, field))
        phases = GaugeMetricFamily(
            "baton:topology_phase",
            "1 for the phase the rank is in.",
            labels=["model_name", "phase"],
        )
        for phase in RankPhase:
            phases.add_metric([*self._labels.values(), phase.value], float(stats.phase is phase))
        yield phases
        pauses = HistogramMetricFamily(
            "baton:topology_commit_pause_seconds",
            "Pause between steps while the generation changed.",
            labels=["model_name", "kind"],
        )
        for kind, histogram in self._commit_pauses.items():
            pauses.add_metric(
                [*self._labels.values(), kind], _buckets(histogram), sum_value=histogram.sum
            )
        yield pauses

    def _sample(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), value)
        return family


def engine_registry(
    stats: Callable[[], EngineStats],
    requests: RequestMetrics,
    model_name: str,
    commit_pauses: Mapping[str, Histogram] | None = None,
) -> CollectorRegistry:
    """Create a registry that contains only this engine's metrics.

    Args:
        commit_pauses: histograms of a rank of an expert-parallel group, by kind.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats, requests, model_name, commit_pauses or {}))
    return registry


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    return [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
