"""The contract of one step between scheduler and workers.

No torch, so that schedulers are tested without it.

A worker applies a step in this order: store evicted blocks, start transfers (they may write to
those blocks at once), forget `finished_request_ids`, swap out, swap in, restore offloaded blocks,
copy blocks, add new requests and update known ones, run the tokens, sample. Workers apply steps in
the order in which they were scheduled. Several may be in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_kv_transfer.connector import ConnectorMetadata, ConnectorOutput
from baton_protocol.messages import PromptLogprobs, RoutedExperts, TokenLogprobs
from baton_protocol.sampling import SamplingParams


class BlockCopy(NamedTuple):
    """A copy of one whole block to another. Copies of a list are made in order."""

    source: int
    target: int


@dataclass(slots=True)
class NewRequestData:
    """A request that is new to the worker, or new since a preemption.

    It replaces earlier data of the same id.
    """

    request_id: str
    prompt_token_ids: list[int]
    #: Known output tokens: sent with the request, generated before a preemption, or sampled by the
    #: prefill engine.
    generated_token_ids: list[int]
    sampling_params: SamplingParams
    sample_index: int
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequestData:
    """Changes of a request that the worker knows."""

    request_id: str
    new_block_ids: list[int]
    num_computed_tokens: int
    #: Tokens from position `num_computed_tokens` on that the worker may not know: chosen by the
    #: scheduler (beam search), or sampled by another pipeline stage. Empty: the worker sampled them
    #: itself and has appended them, perhaps in a step still in flight.
    new_token_ids: list[int] = field(default_factory=list)
    #: Copy-on-write: wherever `source` stands in the request's block table, `target` takes its
    #: place. The copy itself is in `SchedulerOutput.block_copies`.
    replaced_blocks: list[BlockCopy] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step: what each worker does."""

    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    #: Tokens to run per request: positions [num_computed_tokens, num_computed_tokens + n). A
    #: request samples in this step iff that range reaches the last token that the worker has when
    #: it runs the step (prompt + generated).
    num_scheduled_tokens: dict[str, int]
    #: Requests that ended or were preempted since the last step. The worker drops them.
    finished_request_ids: list[str]
    connector: ConnectorMetadata = field(default_factory=ConnectorMetadata)
    #: From device blocks to host blocks.
    swap_out: list[BlockCopy] = field(default_factory=list)
    #: From host blocks to device blocks.
    swap_in: list[BlockCopy] = field(default_factory=list)
    #: Between device blocks.
    block_copies: list[BlockCopy] = field(default_factory=list)
    #: From device blocks that the prefix cache evicts for this step to slots of the offload tier.
    store: list[BlockCopy] = field(default_factory=list)
    #: From slots of the offload tier to device blocks; a slot may be one that this step stores.
    #: Copies follow: members of a group copy what their leader has restored.
    restore: list[BlockCopy] = field(default_factory=list)
    #: Increases by one per step; identifies the step in logs and crash dumps.
    step_id: int = 0
    #: Expert-parallel groups: tokens that each rank runs in this step; every rank has an entry.
    #: Empty for an engine outside a group.
    wave_tokens: tuple[int, ...] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def reaches_model_runner(self) -> bool:
        """Whether the step does more than pass metadata to the connector."""
        return bool(
            self.num_scheduled_tokens
            or self.swap_out
            or self.swap_in
            or self.block_copies
            or self.store
            or self.restore
            or self.finished_request_ids
            or self.wave_tokens
        )

    def without_tokens(self) -> SchedulerOutput:
        """Return the rest of a step whose tokens will not run. Workers still apply it, once."""
        connector = replace(self.connector, saves=[])
        return replace(
            self,
            new_requests=[],
            cached_requests=[],
            num_scheduled_tokens={},
            connector=connector,
            wave_tokens=(),
        )


@dataclass(slots=True)
class GrammarOutput:
    """Tokens that structured outputs allow next.

    Computed while the model runs, applied when it samples.
    """

    #: Row order of `bitmask`; only requests that sample in this step and have a grammar.
    request_ids: list[str]
    #: [len(request_ids), ceil(vocab_size / 32)]; token t is allowed iff bit t % 32 of word t // 32
    #: is set.
    bitmask: npt.NDArray[np.int32]


@dataclass(slots=True)
class ModelRunnerOutput:
    """The results of one step."""

    #: The token of each request that sampled in this step.
    sampled_token_ids: dict[str, int] = field(default_factory=dict)
    #: By request, if requested. Requests with a beam_width always have 2 * beam_width top entries.
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    #: By request, if requested: of the prompt tokens that this step predicted, from position
    #: num_computed_tokens + 1 on.
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    #: By request that sampled, if config.observability.count_nans_in_logits is set.
    num_nans_in_logits: dict[str, int] = field(default_factory=dict)
    #: By request, if requested: of the tokens that this step ran.
    routed_experts: dict[str, RoutedExperts] = field(default_factory=dict)
    connector: ConnectorOutput = field(default_factory=ConnectorOutput)
