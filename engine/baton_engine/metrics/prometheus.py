"""EngineStats and RequestMetrics as Prometheus metrics, named as vLLM's with our prefix."""

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
    "num_requests_waiting": "Requests waiting to run, those waiting for remote KV included.",
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
    "kv_transfer_recomputed_tokens": "Known tokens whose KV a prefill engine was to bring, computed here since it did not come.",
    "generation_tokens": "Tokens sampled.",
    "num_preemptions": "Requests preempted for lack of KV blocks.",
    "num_swapped_out_blocks": "KV blocks moved to host memory by preemptions.",
    "num_swapped_in_blocks": "KV blocks moved back from host memory.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "offload_blocks_stored": "KV blocks copied to host memory when the prefix cache evicted them.",
    "offload_blocks_restored": "KV blocks copied back from host memory for the prefix of a request.",
}
_TRANSFER_COUNTERS = {
    "blocks_sent": "KV blocks published to decode engines; with push also written to them.",
    "blocks_received": "KV blocks that came from prefill engines and were proved.",
    "bytes_sent": "Bytes of KV written to decode engines.",
    "bytes_received": "Bytes of KV that came from prefill engines and were proved.",
    "descriptors_posted": "Runs of memory asked of the transport, after merging.",
    "transfers_completed": "KV transfers that ended well, counted once per worker.",
    "checksum_failures": "KV blocks that arrived wrong and were not used.",
    "leases_expired": "KV transfers given up because the consumer went silent.",
    "descriptors_refused": "Runs of memory that a peer named and may not touch.",
    "handshakes_refused": "Peers of another model, layout, release or service.",
    "memory_fences": "Times all peers were cut off because one did not confirm that it writes no more.",
    "receive_seconds": "Time between the start and the end of KV loads, summed.",
    "send_seconds": "Time between the first and the last write of pushes, summed.",
}
_TRANSFER_GAUGES = {
    "queued_bytes": "Bytes of KV wanted, and not asked for yet because a peer's window is full.",
    "inflight_bytes": "Bytes of KV under way.",
}
_TOPOLOGY_GAUGES = {
    "generation": "Number of the generation of the expert-parallel group that the rank is in; 0: none.",
    "rank": "The rank's place in it.",
    "size": "Ranks of the generation.",
    "wave": "The wave that runs, or the next one.",
    "wave_running": "1 while a wave runs: all ranks step together.",
}
_TOPOLOGY_COUNTERS = {
    "num_steps": "Steps run together with the other ranks.",
    "num_steps_without_tokens": "Of these: steps that only lent the rank's experts to the others.",
    "num_broken": "Generations that lost a member while the rank was in them.",
    "exchange_seconds": "Time in exchanges before steps, waiting for the slowest rank included, summed.",
}
_SLEEP_STATES = {None: "awake", 0: "paused", 1: "weights_offloaded", 2: "discard_all"}


class EngineCollector(Collector):
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
            "baton:kv_cache_usage_perc", "KV blocks in use, 1 is all.", labels=["model_name"]
        )
        yield self._sample(usage, stats.kv_cache_usage)
        for field, text in _COUNTERS.items():
            yield self._sample(
                CounterMetricFamily(f"baton:{field}", text, labels=["model_name"]),
                getattr(stats, field),
            )
        busy = CounterMetricFamily(
            "baton:busy_seconds",
            "Seconds in which a step with tokens was under way.",
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
            "Bytes of KV sent and received, by the transport and the lane that moved them.",
            labels=["model_name", "transport", "lane"],
        )
        for carrier, nbytes in stats.bytes_moved.items():
            moved.add_metric([*self._labels.values(), *carrier.split(" ", 1)], nbytes)
        yield moved
        failed = CounterMetricFamily(
            "baton:kv_transfer_transfers_failed",
            "KV transfers that did not bring all their blocks, counted once per worker.",
            labels=["model_name", "reason"],
        )
        for reason in (
            FailureReason
        ):  # also those that never happened: a rate needs the zero before the first
            failed.add_metric([*self._labels.values(), reason], stats.failures.get(reason, 0))
        yield failed
        works = GaugeMetricFamily(
            "baton:kv_transfer_up",
            "0 once a defect ended the connector of a worker.",
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
            "No step could run for so long, for the generation changed.",
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
    """A registry of its own: nothing else in the process adds to it.

    Args:
        commit_pauses: of a rank of a group, by kind.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats, requests, model_name, commit_pauses or {}))
    return registry


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    return [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
