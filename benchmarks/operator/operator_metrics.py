"""Reads the operator's own metrics, and computes the difference of two readings."""

from __future__ import annotations

import urllib.request
from collections import Counter
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

SECONDS = "baton_operator_reconcile_seconds"


@dataclass
class Reading:
    requests: Counter[str]  #: Requests to the API server by verb.
    buckets: dict[float, float]  #: Cumulative number of reconciles by upper bound in seconds.
    queue_depth: float

    @classmethod
    def of(cls, port: int) -> Reading:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples]
        requests: Counter[str] = Counter()
        for sample in samples:
            if sample.name == "baton_operator_api_requests_total":
                requests[sample.labels["verb"]] += round(sample.value)
        buckets = {float(s.labels["le"]): s.value for s in samples if s.name == f"{SECONDS}_bucket"}
        depth = sum(s.value for s in samples if s.name == "baton_operator_queue_depth")
        return cls(requests, buckets, depth)

    def since(self, before: Reading) -> Reading:
        buckets = {bound: count - before.buckets[bound] for bound, count in self.buckets.items()}
        return Reading(self.requests - before.requests, buckets, self.queue_depth)

    @property
    def reconciles(self) -> int:
        return round(max(self.buckets.values()))

    def quantile_ms(self, share: float) -> float:
        """Return a quantile of the reconcile time in milliseconds, interpolated as in Prometheus.

        Args:
            share: the quantile, from 0 to 1.
        """
        wanted, lower, below = share * self.reconciles, 0.0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if count >= wanted and count > below:
                upper = bound if bound != float("inf") else lower
                return 1e3 * (lower + (upper - lower) * (wanted - below) / (count - below))
            lower, below = bound, count
        return 0.0
