"""Prometheus metrics of one gateway, under `baton:`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FIRST_TOKEN_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
_GAP_BUCKETS = (1.5, 2, 2.5, 3, 3.5, 4, 5, 7.5, 10, 15, 20, 30, 60)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)


class GatewayMetrics:
    """One registry per gateway, so that several may live in one process (tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "baton:http_requests",
            "HTTP requests answered.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.client_requests = Counter(
            "baton:client_requests",
            "HTTP requests of each API key, by the key's name.",
            ["client", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "baton:requests_in_flight", "Generation requests being served.", registry=self.registry
        )
        self.held = Gauge(
            "baton:requests_held",
            "Of these: held until a decode engine has started.",
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "baton:time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            registry=self.registry,
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self.inter_token_latency = Histogram(
            "baton:inter_token_latency_seconds",
            "Between two outputs of one sequence, per token.",
            registry=self.registry,
            buckets=_TOKEN_BUCKETS,
        )
        self.e2e_latency = Histogram(
            "baton:e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer.",
            registry=self.registry,
            buckets=_REQUEST_BUCKETS,
        )
        self.prompt_tokens = Counter(
            "baton:prompt_tokens", "Prompt tokens of sequences.", registry=self.registry
        )
        self.generation_tokens = Counter(
            "baton:generation_tokens", "Tokens generated.", registry=self.registry
        )
        self.prefill_legs = Counter(
            "baton:prefill_legs",
            "Sequences sent to a prefill engine: done, refused, failed or timed_out.",
            ["outcome"],
            registry=self.registry,
        )
        self.prefill_fallbacks = Counter(
            "baton:prefill_fallbacks",
            "Sequences whose decode engine prefilled although a prefill leg was wanted.",
            ["reason"],
            registry=self.registry,
        )
        self.retries = Counter(
            "baton:request_retries",
            "Sequences sent to another decode engine.",
            ["reason"],
            registry=self.registry,
        )
        self.resumed = Counter(
            "baton:requests_resumed",
            "Retries that went on after tokens already seen.",
            ["reason"],
            registry=self.registry,
        )
        self.replayed_tokens = Counter(
            "baton:replayed_tokens",
            "Generated tokens that were sent along to another engine, which computes their KV again.",
            registry=self.registry,
        )
        self.stream_gap = Histogram(
            "baton_gateway_stream_gap_seconds",
            "Silences of more than a second between two outputs of one sequence.",
            registry=self.registry,
            buckets=_GAP_BUCKETS,
        )
        self.offset_errors = Counter(
            "baton:token_offset_errors",
            "Outputs that left a gap or repeated a token.",
            registry=self.registry,
        )
        self.engines_ready = Gauge(
            "baton:engines_ready", "Engines that take requests.", ["role"], registry=self.registry
        )
        self.pair_mismatches = Counter(
            "baton:engine_pair_mismatches",
            "Prefill and decode engines found with different config hashes; they are never paired.",
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)
