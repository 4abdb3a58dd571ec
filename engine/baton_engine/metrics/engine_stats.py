"""Counters and gauges of an engine, as one struct for metrics, the utility RPC and heartbeats."""

from __future__ import annotations

import msgspec

from baton_engine.metrics.topology_stats import TopologyStats
from baton_kv_transfer.connector import ConnectorStats


class EngineStats(msgspec.Struct, kw_only=True):
    """Gauges and counters of an engine.

    The gauges are declared first, and `prompt_tokens` is the first counter. The counters start at 0
    when the engine starts. `kv_transfer` and `topology` contain both gauges and counters.
    """

    num_requests_running: int = 0
    #: Queued requests, including those that wait for remote KV.
    num_requests_waiting: int = 0
    #: Preempted requests with blocks in host memory. They also count as waiting.
    num_requests_swapped: int = 0
    num_requests_waiting_for_remote_kv: int = 0
    #: KV transfers that are in progress although their requests have ended.
    num_transfers_held: int = 0
    #: Fraction of KV blocks in use, 0 to 1.
    kv_cache_usage: float = 0.0
    #: Prefix blocks in the offload tier.
    offload_blocks: int = 0
    draining: bool = False
    paused: bool = False
    #: 0, 1 or 2. None: awake.
    sleep_level: int | None = None

    #: Prompt tokens of started requests. The next three counters split these tokens by the source
    #: of their KV.
    prompt_tokens: int = 0
    #: Prompt tokens computed in this engine, including recomputation after a preemption.
    prompt_tokens_computed: int = 0
    prompt_tokens_remote: int = 0
    prompt_tokens_cached: int = 0
    #: Tokens of arriving requests that this engine computed because a prefill engine did not send
    #: their KV.
    kv_transfer_recomputed_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    #: NaN logits of sampled tokens. 0 unless `observability.count_nans_in_logits` is set.
    num_nans_in_logits: int = 0
    #: KV blocks moved to host memory.
    num_swapped_out_blocks: int = 0
    #: KV blocks moved back to the device.
    num_swapped_in_blocks: int = 0
    #: Tokens looked up in the prefix cache.
    prefix_cache_queries: int = 0
    #: Tokens found in the prefix cache.
    prefix_cache_hits: int = 0
    #: KV blocks copied to the offload tier when the prefix cache evicted them.
    offload_blocks_stored: int = 0
    #: KV blocks copied back from the offload tier for a request's prefix.
    offload_blocks_restored: int = 0
    #: Ended requests by finish reason.
    requests_finished: dict[str, int] = {}
    #: None without a KV connector.
    kv_transfer: ConnectorStats | None = None
    #: None: the engine is not a rank of an expert-parallel group.
    topology: TopologyStats | None = None

    @property
    def num_unfinished(self) -> int:
        """Number of requests and KV transfers that a drain waits for."""
        return self.num_requests_running + self.num_requests_waiting + self.num_transfers_held
