"""Exports EngineStats and RequestMetrics as Prometheus metrics.

A metric that vLLM also has carries vLLM's name, with the prefix `baton:`.
"""

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

_Family = GaugeMetricFamily | CounterMetricFamily

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to run, including those waiting for remote KV.",
    "num_requests_swapped": "Preempted requests whose KV blocks are in host memory.",
    "num_requests_waiting_for_remote_kv": "Requests whose prompt is computed by a prefill engine.",
    "num_transfers_held": "KV transfers of ended requests whose blocks are still in use.",
    "offload_blocks": "Blocks of the prefix cache in the offload tier (host memory).",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that started.",
    "prompt_tokens_computed": "Prompt tokens run through the model in this engine.",
    "prompt_tokens_remote": "Prompt tokens whose KV came from a prefill engine.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "kv_transfer_recomputed_tokens": "Tokens computed because their KV did not arrive from a peer.",
    "generation_tokens": "Tokens sampled.",
    "num_preemptions": "Requests preempted for lack of KV blocks.",
    "num_nans_in_logits": "NaN logits of sampled tokens, with --count-nans-in-logits.",
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
    "size": "Number of ranks of the generation.",
    "wave": "Number of the running wave, or of the next wave if none runs.",
    "wave_running": "1 while a wave runs, in which all ranks step together.",
}
_TOPOLOGY_COUNTERS = {
    "num_steps": "Steps run together with the other ranks.",
    "num_steps_without_tokens": "Dummy batches: steps that only ran experts for other ranks.",
    "num_broken": "Generations that lost a member while the rank was in them.",
    "exchange_seconds": "Total time in exchanges of votes, including waits for other ranks.",
}
_SLEEP_STATES = {None: "awake", 0: "paused", 1: "weights_offloaded", 2: "discard_all"}


class EngineCollector(Collector):
    """A Prometheus collector that reads an engine's stats at each scrape."""

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
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._fields(GaugeMetricFamily, "", _GAUGES, stats)
        yield self._filled(
            GaugeMetricFamily(
                "baton:kv_cache_usage_perc",
                "Fraction of KV blocks in use, 0 to 1.",
                labels=["model_name"],
            ),
            {(): stats.kv_cache_usage},
        )
        yield from self._fields(CounterMetricFamily, "", _COUNTERS, stats)
        yield self._filled(
            CounterMetricFamily(
                "baton:busy_seconds",
                "Seconds in which a step with tokens was in flight.",
                labels=["model_name"],
            ),
            {(): self._requests.busy_s},
        )
        yield self._filled(
            CounterMetricFamily(
                "baton:request_success", "Ended requests.", labels=["model_name", "finished_reason"]
            ),
            {(reason,): count for reason, count in stats.requests_finished.items()},
        )
        yield self._filled(
            GaugeMetricFamily(
                "baton:engine_sleep_state",
                "1 for the sleep state that the engine is in, 0 for other states.",
                labels=["model_name", "sleep_state"],
            ),
            {(state,): float(stats.sleep_level == level) for level, state in _SLEEP_STATES.items()},
        )
        for name, histogram in self._requests.histograms.items():
            family = HistogramMetricFamily(f"baton:{name}", histogram.text, labels=["model_name"])
            family.add_metric([self._model_name], _buckets(histogram), sum_value=histogram.sum)
            yield family
        if stats.kv_transfer is not None:
            yield from self._transfers(stats.kv_transfer)
        if stats.topology is not None:
            yield from self._topology(stats.topology)

    def _transfers(self, stats: ConnectorStats) -> Iterator[Metric]:
        yield from self._fields(CounterMetricFamily, "kv_transfer_", _TRANSFER_COUNTERS, stats)
        yield from self._fields(GaugeMetricFamily, "kv_transfer_", _TRANSFER_GAUGES, stats)
        yield self._filled(
            CounterMetricFamily(
                "baton:kv_transfer_bytes",
                "Bytes of KV sent and received, by transport and lane (mechanism and device).",
                labels=["model_name", "transport", "lane"],
            ),
            {tuple(carrier.split(" ", 1)): n for carrier, n in stats.bytes_moved.items()},
        )
        yield self._filled(
            CounterMetricFamily(
                "baton:kv_transfer_transfers_failed",
                "KV transfers that did not transfer all their blocks, counted once per worker.",
                labels=["model_name", "reason"],
            ),
            # Also reasons without failures, because Prometheus rates need a sample of 0.
            {(reason,): stats.failures.get(reason, 0) for reason in FailureReason},
        )
        yield self._filled(
            GaugeMetricFamily(
                "baton:kv_transfer_up",
                "0 after the connector of a worker has failed.",
                labels=["model_name"],
            ),
            {(): float(not stats.failure)},
        )

    def _topology(self, stats: TopologyStats) -> Iterator[Metric]:
        yield from self._fields(GaugeMetricFamily, "topology_", _TOPOLOGY_GAUGES, stats)
        yield from self._fields(CounterMetricFamily, "topology_", _TOPOLOGY_COUNTERS, stats)
        yield self._filled(
            GaugeMetricFamily(
                "baton:topology_phase",
                "1 for the phase that the rank is in, 0 for other phases.",
                labels=["model_name", "phase"],
            ),
            {(phase.value,): float(stats.phase is phase) for phase in RankPhase},
        )
        pauses = HistogramMetricFamily(
            "baton:topology_commit_pause_seconds",
            "Time without steps while the generation changed.",
            labels=["model_name", "kind"],
        )
        for kind, histogram in self._commit_pauses.items():
            pauses.add_metric(
                [self._model_name, kind], _buckets(histogram), sum_value=histogram.sum
            )
        yield pauses

    def _fields(
        self, kind: type[_Family], prefix: str, texts: Mapping[str, str], stats: object
    ) -> Iterator[Metric]:
        """Yield one metric for each field of `stats` that is a key of `texts`.

        Args:
            kind: class of the metrics: gauge or counter.
            prefix: text between `baton:` and the field name in the metric's name.
            texts: help texts by field name.
        """
        for field, text in texts.items():
            family = kind(f"baton:{prefix}{field}", text, labels=["model_name"])
            yield self._filled(family, {(): getattr(stats, field)})

    def _filled(self, family: _Family, values: Mapping[tuple[str, ...], float]) -> Metric:
        """Add one sample per entry of `values` to `family`, and return `family`.

        Args:
            values: value of each sample. The key has the values of the sample's labels, except for
                `model_name`, which comes first.
        """
        for labels, value in values.items():
            family.add_metric([self._model_name, *labels], value)
        return family


def engine_registry(
    stats: Callable[[], EngineStats],
    requests: RequestMetrics,
    model_name: str,
    commit_pauses: Mapping[str, Histogram] | None = None,
) -> CollectorRegistry:
    """Create a Prometheus registry with the metrics of one engine.

    Args:
        commit_pauses: histograms from `topology_stats.commit_pauses`. None: the engine is not a
            rank of an expert-parallel group.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats, requests, model_name, commit_pauses or {}))
    return registry


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    return [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
