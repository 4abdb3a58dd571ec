"""Compute measurements per role over a time window, from scrapes of /metrics. Pure.

Counters are measured as differences between scrapes of the same container. So counts before the
first scrape in the window are ignored. After a restart of a container, its counters start at zero.
A pod that exists for a part of the window contributes to that part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import fsum, inf, isfinite

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton_operator.names import MEMBER_ROLES, MemberRole

#: Endpoints whose requests count as demand.
GENERATION_ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
#: HTTP codes of client errors. These requests are not demand: more engines would not change the
#: response.
REFUSALS = ("400", "401", "403", "404", "405", "408", "413", "415", "422")

TTFT = "baton:time_to_first_token_seconds"
ITL = "baton:inter_token_latency_seconds"
QUEUE_TIME = "baton:request_queue_time_seconds"
PREFILL_TIME = "baton:request_prefill_time_seconds"
RUNNING = "baton:num_requests_running"
WAITING = "baton:num_requests_waiting"
WAITING_FOR_REMOTE_KV = "baton:num_requests_waiting_for_remote_kv"
KV_USAGE = "baton:kv_cache_usage_perc"
BUSY = "baton:busy_seconds"
IN_FLIGHT = "baton:requests_in_flight"
HELD = "baton:requests_held"
HTTP_REQUESTS = "baton:http_requests"

ENGINE_GAUGES = (RUNNING, WAITING, WAITING_FOR_REMOTE_KV, KV_USAGE)
ENGINE_HISTOGRAMS = (TTFT, ITL, QUEUE_TIME, PREFILL_TIME)
GATEWAY_GAUGES = (IN_FLIGHT, HELD)
_METRICS = (
    *ENGINE_GAUGES,
    *ENGINE_HISTOGRAMS,
    *GATEWAY_GAUGES,
    BUSY,
    HTTP_REQUESTS,
)
#: Matches the lines to parse, which are about a tenth of a scrape. Parsing is slow.
_READ = re.compile(rf"^(?:# (?:HELP|TYPE) )?(?:{'|'.join(_METRICS)})[_{{ ].*\n?", re.MULTILINE)
#: Limits on a scrape, whose content is untrusted. The time to parse a line grows with the square of
#: its length.
MAX_LINE_LENGTH = 1024
MAX_PARSED_LENGTH = 2**17
#: Limit on the number of different buckets in one histogram, and in the sum of all histograms.
MAX_BUCKETS = 128


class CumulativeHistogram(msgspec.Struct, frozen=True):
    """A cumulative histogram for the time since process start or between two scrapes."""

    #: Number of observations up to each upper bound. The last bound is infinite.
    buckets: dict[float, float] = {}
    sum: float = 0.0

    @property
    def count(self) -> float:
        return self.buckets.get(inf, 0.0)

    @property
    def mean(self) -> float | None:
        """Mean of the observations; None without observations."""
        return self.sum / self.count if self.count > 0 else None

    def __add__(self, other: CumulativeHistogram) -> CumulativeHistogram:
        """Return a histogram with the observations of both histograms.

        For a bound that one histogram lacks, that histogram's count at the next lower bound is
        used. So a quantile of the result is an upper estimate.

        Raises:
            ValueError: the result would have more than MAX_BUCKETS buckets.
        """
        bounds = sorted({*self.buckets, *other.buckets})
        if len(bounds) > MAX_BUCKETS:
            raise ValueError(f"the histograms of all pods have more than {MAX_BUCKETS} buckets")
        ours, theirs = self._at(bounds), other._at(bounds)
        counts = {
            bound: our + their for bound, our, their in zip(bounds, ours, theirs, strict=True)
        }
        return CumulativeHistogram(counts, self.sum + other.sum)

    def since(self, before: CumulativeHistogram) -> CumulativeHistogram:
        """Return a histogram of the observations since `before`.

        `before` is an earlier histogram of the same process.
        """
        bounds = sorted(self.buckets)
        counts = {
            bound: self.buckets[bound] - earlier
            for bound, earlier in zip(bounds, before._at(bounds), strict=True)
        }
        return CumulativeHistogram(counts, self.sum - before.sum)

    def _at(self, bounds: Sequence[float]) -> list[float]:
        """Return the number of observations up to each of `bounds`, which are in ascending order.

        For a bound that is not in `buckets`, the number is that of the next lower bound.
        """
        counts: list[float] = []
        buckets = iter(sorted(self.buckets.items()))
        following = next(buckets, None)
        count = 0.0
        for bound in bounds:
            while following is not None and following[0] <= bound:
                count = max(count, following[1])
                following = next(buckets, None)
            counts.append(self.buckets.get(bound, count))
        return counts

    def quantile(self, q: float) -> float | None:
        """Return a quantile, computed like `histogram_quantile` of Prometheus.

        The quantile is interpolated linearly inside a bucket. In the last bucket, the result is the
        largest finite bound.

        Args:
            q: the quantile, with 0 < q < 1.

        Returns:
            None without observations.
        """
        if self.count <= 0:
            return None
        rank, lower, below = q * self.count, 0.0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if count >= rank:
                if not isfinite(bound):
                    return lower
                return lower + (bound - lower) * (rank - below) / (count - below)
            if isfinite(bound):
                lower, below = bound, count
        return lower


class ScrapedSample(msgspec.Struct, frozen=True):
    """The metrics that decisions need, from one scrape of one container."""

    #: Role of the engine. None: a gateway.
    role: MemberRole | None
    gauges: dict[str, float]
    histograms: dict[str, CumulativeHistogram]
    #: Number of generation requests that a gateway has answered since its start, excluding client
    #: errors.
    requests: float = 0.0
    #: Seconds for which an engine has run steps since its start. None: the metric is missing.
    busy_s: float | None = None

    def began_after(self, before: ScrapedSample) -> bool:
        """Return whether the process was restarted between the sample `before` and this one.

        True if a counter is lower than in `before`.
        """
        return self.requests < before.requests or any(
            name in before.histograms and histogram.count < before.histograms[name].count
            for name, histogram in self.histograms.items()
        )


class Snapshot(msgspec.Struct, frozen=True):
    """The samples of all pods of a service at one time."""

    #: Time of the scrapes in seconds.
    at: float
    #: Samples by container id: the pod's uid and its number of restarts.
    samples: dict[str, ScrapedSample]


class RoleWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of all prefill engines or all decode engines over a time window.

    Times are in seconds. Gauges are averaged over scrapes and engines.
    """

    #: Number of engines with at least two scrapes, the last of which is recent.
    engines: int
    #: Quantile of the time from arrival at the engine to the first token. None: no first token.
    ttft_s: float | None = None
    #: Number of observations of `ttft_s`.
    first_tokens: float = 0.0
    #: Quantile of the time between tokens. None: no tokens.
    itl_s: float | None = None
    #: Number of observations of `itl_s`.
    tokens: float = 0.0
    #: Tokens per second of all engines, excluding first tokens.
    tokens_per_s: float = 0.0
    #: First tokens per second of all engines.
    requests_per_s: float = 0.0
    #: Mean time from arrival to the first step, of requests that ended.
    queue_s: float = 0.0
    #: Mean time from the first step to the first token, of requests that ended.
    prefill_s: float = 0.0
    #: Mean fraction of time in which an engine computes, 0 to 1. If engines lack the metric BUSY:
    #: the mean number of prompts that are being computed, at most 1 (Little's law).
    busy: float = 0.0
    #: Running sequences per engine.
    running: float = 0.0
    #: Waiting requests per engine, excluding those that wait for KV blocks of a prefill engine.
    waiting: float = 0.0
    #: Growth of the queues of all engines, in requests per second.
    waiting_growth_per_s: float = 0.0
    #: Fraction of KV blocks in use, 0 to 1.
    kv_usage: float = 0.0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of all pods of one service over a time window."""

    #: Time of the first scrape.
    start: float
    #: Time of the last scrape.
    end: float
    #: The quantile of `ttft_s` and `itl_s`.
    quantile: float
    roles: dict[MemberRole, RoleWindow]
    #: Number of gateways with a recent scrape.
    gateways: int = 0
    #: Number of generation requests at the gateways in the last scrapes, including held requests.
    in_flight: float = 0.0
    #: Number of requests in `in_flight` that wait for a decode engine to start.
    held: float = 0.0
    #: Time of the last scrape that showed a newly answered request. None: no scrape did.
    answered_at: float | None = None
    #: Time of the last scrape that showed a running or newly answered request. None: no scrape did.
    active_at: float | None = None


def sample(role: MemberRole | None, text: str) -> ScrapedSample:
    """Parse the metrics from one scrape. Series of one metric with different labels are added up.

    Args:
        role: role of the engine; None for a gateway.
        text: the metrics in Prometheus' text format.

    Raises:
        ValueError: the text is not in that format, has no metric of an engine or gateway, has a
            gauge that is not finite, or exceeds a limit.
    """
    gauges: dict[str, float] = {}
    histograms: dict[str, CumulativeHistogram] = {}
    requests = 0.0
    busy_s: float | None = None
    for family in text_string_to_metric_families(_lines_to_parse(text)):
        if family.name in ENGINE_HISTOGRAMS:
            buckets: dict[float, float] = {}
            total = 0.0
            for item in family.samples:
                if item.name.endswith("_bucket"):
                    bound = float(item.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + item.value
                elif item.name.endswith("_sum"):
                    total += item.value
            if len(buckets) > MAX_BUCKETS:
                raise ValueError(f"{family.name} has more than {MAX_BUCKETS} buckets")
            histograms[family.name] = CumulativeHistogram(buckets, total)
        elif family.name == HTTP_REQUESTS:
            requests = sum(
                item.value
                for item in family.samples
                if item.name.endswith("_total")
                and item.labels.get("endpoint") in GENERATION_ENDPOINTS
                and item.labels.get("status") not in REFUSALS
            )
        elif family.name == BUSY:
            busy_s = sum(item.value for item in family.samples if item.name.endswith("_total"))
        elif family.name in (*ENGINE_GAUGES, *GATEWAY_GAUGES):
            gauges[family.name] = sum(item.value for item in family.samples)
            if not isfinite(gauges[family.name]):
                raise ValueError(f"{family.name} is {gauges[family.name]}")
    return ScrapedSample(role, gauges, histograms, requests, busy_s)


def _lines_to_parse(text: str) -> str:
    lines: list[str] = []
    length = 0
    for match in _READ.finditer(text):
        lines.append(match.group())
        length += len(lines[-1])
        if len(lines[-1]) > MAX_LINE_LENGTH:
            raise ValueError(f"a line has more than {MAX_LINE_LENGTH} characters")
        if length > MAX_PARSED_LENGTH:
            raise ValueError(f"its metrics have more than {MAX_PARSED_LENGTH} characters")
    if not lines:
        raise ValueError("the reply has no metric of an engine or a gateway")
    return "".join(lines)


def window(
    snapshots: Sequence[Snapshot], *, start: float, fresh_s: float, quantile: float
) -> Window | None:
    """Return the measurements since the time `start`.

    Args:
        snapshots: snapshots in any order. Those before `start` are ignored.
        fresh_s: a container counts as existing for this many seconds after its last sample.
        quantile: quantile of latencies, between 0 and 1.

    Returns:
        None if fewer than two snapshots with different times remain.
    """
    inside = sorted((s for s in snapshots if s.at >= start), key=lambda s: s.at)
    if not inside or inside[0].at == inside[-1].at:
        return None
    end = inside[-1].at
    scrapes: dict[str, list[tuple[float, ScrapedSample]]] = {}
    for snapshot in inside:
        for container, scraped in snapshot.samples.items():
            scrapes.setdefault(container, []).append((snapshot.at, scraped))
    # Sorted, so that sums do not depend on the order of replies.
    series = [_series_of(scrapes[container]) for container in sorted(scrapes)]
    live = [each for each in series if end - each.scrapes[-1][0] <= fresh_s]
    span = end - inside[0].at
    gateways = [each for each in series if each.role is None]
    answering = [each.scrapes[-1][1] for each in live if each.role is None]
    return Window(
        start=inside[0].at,
        end=end,
        quantile=quantile,
        roles={
            role: _role(
                [each for each in series if each.role == role],
                [each for each in live if each.role == role],
                span,
                quantile,
            )
            for role in MEMBER_ROLES
        },
        gateways=len(answering),
        in_flight=sum(last.gauges.get(IN_FLIGHT, 0.0) for last in answering),
        held=sum(last.gauges.get(HELD, 0.0) for last in answering),
        answered_at=max((at for each in gateways for at in each.answered), default=None),
        active_at=max(
            (at for each in gateways for at in (*each.answered, *each.occupied)), default=None
        ),
    )


class _Series(msgspec.Struct, frozen=True):
    """The scrapes of one container in the order of time, and the growth of its counters."""

    scrapes: list[tuple[float, ScrapedSample]]
    #: Times of scrapes that showed a new answered request.
    answered: list[float]
    #: Seconds of computation between the first and the last scrape. None: the metric is missing.
    busy_s: float | None
    #: Observations between the first and the last scrape, by metric.
    histograms: dict[str, CumulativeHistogram]

    @property
    def role(self) -> MemberRole | None:
        return self.scrapes[0][1].role

    @property
    def seconds(self) -> float:
        """Seconds from the first scrape to the last."""
        return self.scrapes[-1][0] - self.scrapes[0][0]

    @property
    def occupied(self) -> list[float]:
        """Times of the scrapes that showed requests in flight at a gateway."""
        return [at for at, scraped in self.scrapes if scraped.gauges.get(IN_FLIGHT, 0.0) > 0]

    @property
    def busy(self) -> float:
        """Fraction of time in which the engine computed, at most 1."""
        busy_s = self.total(PREFILL_TIME).sum if self.busy_s is None else self.busy_s
        return min(1.0, busy_s / self.seconds)

    def growth_per_s(self, gauge: str) -> float:
        first, last = self.scrapes[0][1], self.scrapes[-1][1]
        return (last.gauges.get(gauge, 0.0) - first.gauges.get(gauge, 0.0)) / self.seconds

    def mean(self, gauge: str) -> float:
        return _mean(scraped.gauges.get(gauge, 0.0) for _, scraped in self.scrapes)

    def total(self, histogram: str) -> CumulativeHistogram:
        return self.histograms.get(histogram, CumulativeHistogram())


def _series_of(scrapes: list[tuple[float, ScrapedSample]]) -> _Series:
    answered, histograms = list[float](), dict[str, CumulativeHistogram]()
    busy_s = None if scrapes[-1][1].busy_s is None else 0.0
    for (_, before), (at, after) in pairwise(scrapes):
        origin = ScrapedSample(after.role, {}, {}) if after.began_after(before) else before
        if after.requests > origin.requests:
            answered.append(at)
        if busy_s is not None:
            busy_s += max(0.0, (after.busy_s or 0.0) - (origin.busy_s or 0.0))
        for name, histogram in after.histograms.items():
            grown = histogram.since(origin.histograms.get(name, CumulativeHistogram()))
            histograms[name] = histograms.get(name, CumulativeHistogram()) + grown
    return _Series(scrapes, answered, busy_s, histograms)


def _role(series: list[_Series], live: list[_Series], span: float, quantile: float) -> RoleWindow:
    live = [each for each in live if each.seconds > 0]
    if not live:
        return RoleWindow(engines=0)
    ttft, itl = _total(series, TTFT), _total(series, ITL)
    return RoleWindow(
        engines=len(live),
        ttft_s=ttft.quantile(quantile),
        first_tokens=ttft.count,
        itl_s=itl.quantile(quantile),
        tokens=itl.count,
        tokens_per_s=itl.count / span,
        requests_per_s=ttft.count / span,
        queue_s=_total(series, QUEUE_TIME).mean or 0.0,
        prefill_s=_total(series, PREFILL_TIME).mean or 0.0,
        busy=_mean(each.busy for each in live),
        running=_mean(each.mean(RUNNING) for each in live),
        waiting=_mean(
            max(0.0, each.mean(WAITING) - each.mean(WAITING_FOR_REMOTE_KV)) for each in live
        ),
        waiting_growth_per_s=fsum(
            each.growth_per_s(WAITING) - each.growth_per_s(WAITING_FOR_REMOTE_KV) for each in live
        ),
        kv_usage=_mean(each.mean(KV_USAGE) for each in live),
    )


def _total(series: Iterable[_Series], histogram: str) -> CumulativeHistogram:
    return sum((each.total(histogram) for each in series), CumulativeHistogram())


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return fsum(numbers) / len(numbers)  # exact, so independent of the order of pods
