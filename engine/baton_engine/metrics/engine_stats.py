"""What an engine counts: one struct, read by metrics, by the utility RPC and by heartbeats."""

from __future__ import annotations

import msgspec

from baton_engine.metrics.topology_stats import TopologyStats
from baton_kv_transfer.connector import ConnectorStats


class EngineStats(msgspec.Struct, kw_only=True):
    """Gauges of now; the others are counters since start."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    """Queued, and waiting for remote KV."""
    num_requests_swapped: int = 0
    """Preempted, with their blocks in host memory; counted as waiting, too."""
    num_requests_waiting_for_remote_kv: int = 0
    num_transfers_held: int = 0
    """Transfers of ended requests whose blocks are still read or written."""
    kv_cache_usage: float = 0.0
    """Fraction of KV blocks in use, 0 to 1."""
    offload_blocks: int = 0
    """Prefix blocks in the offload tier."""
    draining: bool = False
    paused: bool = False
    sleep_level: int | None = None
    """0, 1 or 2; None: awake."""

    prompt_tokens: int = 0
    """Of requests that started; the next three say where their KV came from."""
    prompt_tokens_computed: int = 0
    """Run through the model here, repetitions after a preemption included."""
    prompt_tokens_remote: int = 0
    prompt_tokens_cached: int = 0
    kv_transfer_recomputed_tokens: int = 0
    """Tokens known when a request came, whose KV was to come from a prefill engine and did not."""
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    """KV blocks moved to host memory; filled by the scheduler."""
    num_swapped_in_blocks: int = 0
    """The way back."""
    prefix_cache_queries: int = 0
    """Tokens looked up."""
    prefix_cache_hits: int = 0
    """Tokens found."""
    offload_blocks_stored: int = 0
    """KV blocks copied to the offload tier when the prefix cache evicted them."""
    offload_blocks_restored: int = 0
    """KV blocks copied back from it for a request's prefix."""
    requests_finished: dict[str, int] = {}
    """By finish reason."""
    kv_transfer: ConnectorStats | None = None
    """None without a connector."""
    topology: TopologyStats | None = None
    """None: the engine is no rank of a group."""

    @property
    def num_unfinished(self) -> int:
        """What a drain waits for: requests, and transfers a peer still needs."""
        return self.num_requests_running + self.num_requests_waiting + self.num_transfers_held
