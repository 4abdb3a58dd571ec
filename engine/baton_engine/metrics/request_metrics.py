"""Histograms of latencies and numbers of tokens, updated with new requests and with outputs.

Times are differences of `time.monotonic()` in the engine process. Recording an output costs a few
dict and list operations.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log

from baton_protocol.engine_messages import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)

_LATENCY_S = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)


def _grid(first: float, last: float, *beyond: float) -> tuple[float, ...]:
    """Return bucket bounds: from `first` to `last` by factors of 1.25, then the bounds in `beyond`.

    A quantile that is computed from such buckets has an error of about 10%.
    """
    steps = ceil(log(last / first) / log(1.25))
    return (*(float(f"{first * 1.25**step:.3g}") for step in range(steps + 1)), *beyond)


_FIRST_TOKEN_S = _grid(0.005, 120.0, 160.0, 640.0, 2560.0)
_TOKEN_S = _grid(0.001, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_STEP_TOKENS = tuple(float(2**exponent) for exponent in range(15))
_LENGTHS = tuple(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5))


class Histogram:
    """A histogram: the number of observations in each bucket.

    One thread may call `observe`. Other threads may read at any time and see consistent counts.
    """

    def __init__(self, text: str, bounds: Sequence[float]) -> None:
        #: Help text of the metric.
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def sum(self) -> float:
        return self._sum

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (upper bound, number of observations up to this bound) for each bucket.

        The last bound is infinite.
        """
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), list(self._counts), strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


@dataclass(slots=True)
class _Progress:
    """Times and numbers of tokens of an unfinished request."""

    arrived: float
    #: Time of the request's first step.
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0


class RequestMetrics:
    """Records the latencies and the numbers of tokens of requests in histograms."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unfinished: dict[str, _Progress] = {}
        #: By metric name, without prefix.
        self.histograms = {
            "time_to_first_token_seconds": Histogram(
                "Time from arrival to the first token.", _FIRST_TOKEN_S
            ),
            "inter_token_latency_seconds": Histogram(
                "Time between a token and the previous token.", _TOKEN_S
            ),
            "e2e_request_latency_seconds": Histogram("Time from arrival to the end.", _LATENCY_S),
            "request_queue_time_seconds": Histogram(
                "Time from arrival to the first step.", _LATENCY_S
            ),
            "request_prefill_time_seconds": Histogram(
                "Time from the first step to the first token.", _LATENCY_S
            ),
            "request_decode_time_seconds": Histogram(
                "Time from the first token to the last token.", _LATENCY_S
            ),
            "request_inference_time_seconds": Histogram(
                "Time from the first step to the last token.", _LATENCY_S
            ),
            "request_prompt_tokens": Histogram("Prompt tokens per ended request.", _LENGTHS),
            "request_generation_tokens": Histogram(
                "Tokens generated here per ended request.", _LENGTHS
            ),
            "request_params_max_tokens": Histogram("max_tokens of requests that set it.", _LENGTHS),
            "iteration_tokens_total": Histogram("Tokens run per step.", _STEP_TOKENS),
        }
        #: Seconds in which a step with tokens was in flight.
        self.busy_s = 0.0
        self._busy_until = 0.0

    def on_add(self, request: EngineCoreRequest) -> None:
        """Record an accepted request."""
        self._unfinished[request.request_id] = _Progress(
            self._clock(), num_prompt_tokens=len(request.prompt_token_ids)
        )
        max_tokens = request.sampling_params.max_tokens
        if max_tokens is not None and request.pooling_params is None:
            self.histograms["request_params_max_tokens"].observe(max_tokens)

    def on_step(self, num_tokens: int, started: float) -> None:
        """Record a step with `num_tokens` tokens that ran from `started` until now.

        A step without tokens is ignored.

        Steps may overlap, but must be recorded in the order in which they end.
        """
        if num_tokens:
            self.histograms["iteration_tokens_total"].observe(num_tokens)
            now = self._clock()
            self.busy_s += now - max(started, self._busy_until)
            self._busy_until = now

    def on_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Record outputs that the engine has just produced.

        Pass the outputs of each request in the order in which they were produced.
        """
        now = self._clock()
        for output in outputs:
            progress = self._unfinished.get(output.request_id)
            if progress is None:
                continue
            if output.events:
                for event in output.events:
                    if event.type is EngineCoreEventType.SCHEDULED and progress.scheduled is None:
                        progress.scheduled = event.timestamp
            num_tokens = len(output.new_token_ids)
            if num_tokens:
                self._on_tokens(progress, num_tokens, now)
            if output.finish_reason is not None:
                self._on_end(output.request_id, output.finish_reason, progress, now)

    def _on_tokens(self, progress: _Progress, num_tokens: int, now: float) -> None:
        if progress.last_token is None:
            progress.first_token = now
            self.histograms["time_to_first_token_seconds"].observe(now - progress.arrived)
        else:
            # Tokens of one output arrive together and share the time since the previous output.
            latency = (now - progress.last_token) / num_tokens
            self.histograms["inter_token_latency_seconds"].observe(latency, num_tokens)
        progress.last_token = now
        progress.num_generated_tokens += num_tokens

    def _on_end(
        self, request_id: str, reason: FinishReason, progress: _Progress, now: float
    ) -> None:
        del self._unfinished[request_id]
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            return  # the histograms below describe only requests that ran to their end
        histograms = self.histograms
        histograms["e2e_request_latency_seconds"].observe(now - progress.arrived)
        histograms["request_prompt_tokens"].observe(progress.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(progress.num_generated_tokens)
        first, last, scheduled = progress.first_token, progress.last_token, progress.scheduled
        if first is not None and last is not None:
            histograms["request_decode_time_seconds"].observe(last - first)
        if scheduled is not None:
            histograms["request_queue_time_seconds"].observe(max(0.0, scheduled - progress.arrived))
            if first is not None and last is not None:
                histograms["request_prefill_time_seconds"].observe(first - scheduled)
                histograms["request_inference_time_seconds"].observe(last - scheduled)
