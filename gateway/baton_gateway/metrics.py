"""The gateway's Prometheus metrics, whose names begin with `baton:`.

A metric's name begins with `baton:gateway_` if engines have a metric for the same quantity. The
gateway measures what clients observe. An engine measures only its own part.
"""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton_protocol.process.metrics_text import MetricsText

#: Gaps of more than this many seconds between two outputs are recorded in
#: `gateway_stream_gap_seconds`.
GAP_S = 1.0

# Upper bounds in seconds.
# fmt: off
_FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
)
# fmt: on
_GAP_BUCKETS = (1.5, 2, 2.5, 3, 3.5, 4, 5, 7.5, 10, 15, 20, 30, 60)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)


class GatewayMetrics:
    """The Prometheus metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.text = MetricsText(self.registry)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "baton:http_requests",
            "HTTP requests that have ended. Status 499: the client disconnected before the end.",
            ["endpoint", "status"],
        )
        self.client_requests = counter(
            "baton:client_requests",
            "HTTP requests per API key, by the key's name.",
            ["client", "status"],
        )
        self.unknown_body_fields = counter(
            "baton:gateway_unknown_body_fields",
            "Unknown top-level fields of request bodies, which the gateway ignores.",
        )
        self.connections = gauge(
            "baton:gateway_connections", "Open connections of clients, with TLS handshakes."
        )
        self.closed_connections = counter(
            "baton:gateway_closed_connections",
            "Connections that the gateway closed. Reasons: timeout (no request arrived in time), "
            "evicted (the limit was reached, and it waited longest for a request), refused (the "
            "limit was reached, and all connections had a request), large_head (the heads of its "
            "requests were too large).",
            ["reason"],
        )
        self.body_bytes = gauge(
            "baton:gateway_body_bytes",
            "Bytes of request bodies until their prompts are tokenized, 64 for each of their "
            "values, and bytes of complete responses that clients have not read.",
        )
        self.in_flight = gauge("baton:requests_in_flight", "Generation requests being served.")
        self.held = gauge(
            "baton:requests_held", "Generation requests in the scale-from-zero queue."
        )
        self.time_to_first_token = histogram(
            "baton:gateway_time_to_first_token_seconds",
            "Time from a request's arrival at the gateway to the first token of a sequence.",
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self.inter_token_latency = histogram(
            "baton:gateway_inter_token_latency_seconds",
            "Time between two outputs of one sequence at the gateway, per token of the second.",
            buckets=_TOKEN_BUCKETS,
        )
        self.e2e_latency = histogram(
            "baton:gateway_e2e_request_latency_seconds",
            "Time from a request's arrival at the gateway to the end of its response.",
            buckets=_REQUEST_BUCKETS,
        )
        self.prompt_tokens = counter(
            "baton:gateway_prompt_tokens", "Prompt tokens of requests, each prompt counted once."
        )
        self.generation_tokens = counter(
            "baton:gateway_generation_tokens", "Tokens received from engines for clients."
        )
        self.prefill_stages = counter(
            "baton:prefill_stages",
            "Prefill stages on prefill engines: done, refused or failed.",
            ["outcome"],
        )
        self.prefill_fallbacks = counter(
            "baton:prefill_fallbacks",
            "Prompts that a decode engine computed in place of a prefill engine.",
            ["reason"],
        )
        self.retries = counter(
            "baton:request_retries", "Sequences sent to another decode engine.", ["reason"]
        )
        self.resumed = counter(
            "baton:requests_resumed",
            "Retries of sequences that had already generated tokens.",
            ["reason"],
        )
        self.replayed_tokens = counter(
            "baton:replayed_tokens",
            "Generated tokens sent to another engine on a retry, which recomputes their KV cache.",
        )
        self.stream_gap = histogram(
            "baton:gateway_stream_gap_seconds",
            "Time between two outputs of one sequence, if longer than a second.",
            buckets=_GAP_BUCKETS,
        )
        self.offset_errors = counter(
            "baton:token_offset_errors", "Engine outputs that left out or repeated a token."
        )
        self.engines_ready = gauge("baton:engines_ready", "Engines that accept requests.", ["role"])
        self.pair_mismatches = counter(
            "baton:engine_pair_mismatches",
            "Pairs of prefill and decode engines that cannot exchange KV blocks, because their "
            "compatibility hash or KV transport differs.",
        )


class TokenTimer:
    """Records the time to first token of one sequence, and the time per token of later outputs.

    Args:
        arrived: monotonic time at which the request arrived, in seconds.
    """

    def __init__(self, metrics: GatewayMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._last = arrived
        self._has_tokens = False

    def on_tokens(self, count: int) -> None:
        """Record an output with `count` new tokens that arrives now.

        For the first output, the time since the request's arrival is recorded. For each later
        output, the time since the previous output, divided by `count`, is recorded.
        """
        now = time.monotonic()
        silence = now - self._last
        if self._has_tokens:
            self._metrics.inter_token_latency.observe(silence / count)
            if silence > GAP_S:
                self._metrics.stream_gap.observe(silence)
        else:
            self._metrics.time_to_first_token.observe(silence)
        self._last, self._has_tokens = now, True
        self._metrics.generation_tokens.inc(count)
