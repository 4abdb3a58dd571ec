"""What the scheduler tells the executor in one step, and what comes back. Torch-free, so that schedulers are tested without it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_engine.protocol.messages import TokenLogprobs
from baton_engine.protocol.sampling import SamplingParams
from baton_kv_transfer.connector import ConnectorMetadata, ConnectorOutput


@dataclass(slots=True)
class NewRequestData:
    """First time the worker sees a request, or the first time after a preemption: it replaces whatever the worker had."""

    request_id: str
    prompt_token_ids: list[int]
    generated_token_ids: list[int]
    """Known output tokens (continued, or generated before a preemption, or sampled by the prefill side)."""
    sampling_params: SamplingParams
    sample_index: int
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequestData:
    """A request the worker already knows: only what changed. Tokens it sampled itself it has appended itself."""

    request_id: str
    new_block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    """Tokens to run per request: positions [num_computed_tokens, num_computed_tokens + n). A request samples in this step
    iff that range reaches its last known token (prompt + generated)."""
    finished_request_ids: list[str]
    """Ended or preempted since the last step: the worker forgets them."""
    connector: ConnectorMetadata = field(default_factory=ConnectorMetadata)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True)
class ModelRunnerOutput:
    sampled_token_ids: dict[str, int] = field(default_factory=dict)
    """Per request that sampled in this step: the token."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """Per request that asked for them."""
    connector: ConnectorOutput = field(default_factory=ConnectorOutput)
