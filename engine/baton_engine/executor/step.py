"""The data of one step: what the scheduler sends to the workers, and what they return.

A worker applies a step in this order:

1. Store evicted blocks in the offload tier.
2. Start KV transfers, which may write to the evicted blocks at once.
3. Drop the requests of `finished_request_ids`.
4. Swap out, swap in, restore offloaded blocks, copy blocks.
5. Add new requests and update known requests.
6. Run the tokens, then sample.

Workers apply steps in the order in which they were scheduled. Several steps may be in flight. This
module does not import torch, so tests of the scheduler need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_kv_transfer.connector import ConnectorMetadata, ConnectorOutput
from baton_protocol.engine_messages import PromptLogprobs, RoutedExperts, TokenLogprobs
from baton_protocol.pooling_params import PoolingParams
from baton_protocol.sampling_params import SamplingParams


class BlockCopy(NamedTuple):
    """A copy of one whole KV block to another block. Workers run a list of copies in order."""

    source: int
    target: int


@dataclass(slots=True)
class NewRequestData:
    """A request that the worker does not have: a new request, or one that was preempted.

    The data replaces earlier data of the same request id.
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
    #: Set if the request is pooled. Its vector takes the place of the sampled token.
    pooling_params: PoolingParams | None = None


@dataclass(slots=True)
class CachedRequestData:
    """The changes in one step to a request that the worker already has."""

    request_id: str
    new_block_ids: list[int]
    num_computed_tokens: int
    #: Tokens from position `num_computed_tokens` on that the worker may lack: chosen by the
    #: scheduler (beam search), or sampled by another pipeline stage. Empty: the worker itself
    #: samples and appends these tokens, perhaps in a step that is still in flight.
    new_token_ids: list[int] = field(default_factory=list)
    #: Copy-on-write: wherever `source` stands in the request's block table, `target` takes its
    #: place. The copy itself is in `SchedulerOutput.block_copies`.
    replaced_blocks: list[BlockCopy] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step, as the scheduler sends it to every worker."""

    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    #: Number n of tokens to run, by request id: positions [num_computed_tokens,
    #: num_computed_tokens + n). A request samples in this step only if this range includes its last
    #: token so far, a prompt token or a generated one.
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
    #: From device blocks to slots of the offload tier. The prefix cache evicts these device blocks,
    #: because this step overwrites them.
    store: list[BlockCopy] = field(default_factory=list)
    #: From slots of the offload tier to device blocks. The same step may fill the slot by `store`.
    #: `block_copies` run after `restore`, because several samples of one prompt share the restored
    #: blocks, and may copy them.
    restore: list[BlockCopy] = field(default_factory=list)
    #: Increases by one per step; identifies the step in logs and crash dumps.
    step_id: int = 0
    #: In an expert-parallel group: number of tokens that each rank runs in this step, by rank.
    #: Empty for an engine outside a group.
    wave_tokens: tuple[int, ...] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def reaches_model_runner(self) -> bool:
        """Whether the step has work for the model runner, and not only for the KV connector."""
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
        """Return a copy of this step that runs no tokens and saves no KV blocks.

        Block copies, KV loads and finished requests remain, because workers must still apply them.
        """
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
    """The tokens that structured outputs allow next.

    The scheduler computes the bitmask while the model runs, and the sampler applies the bitmask.
    """

    #: Id of the request of each row in `bitmask`. These requests sample in this step and have a
    #: grammar.
    request_ids: list[str]
    #: [len(request_ids), ceil(vocab_size / 32)]. Token t is allowed iff bit t % 32 of word t // 32
    #: is set.
    bitmask: npt.NDArray[np.int32]


@dataclass(slots=True)
class ModelRunnerOutput:
    """The results of one step."""

    #: The token of each request that sampled in this step.
    sampled_token_ids: dict[str, int] = field(default_factory=dict)
    #: By request id, for requests with `logprobs` and for beams. The top entries of a beam are its
    #: best continuations. `worker.sampling.sampler.report_logprobs` describes how many there are.
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    #: By request id, for requests with `prompt_logprobs`. The entries belong to the prompt
    #: tokens that this step predicted, from position num_computed_tokens + 1 on.
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    #: By request id, for requests that sampled. Empty unless
    #: config.observability.count_nans_in_logits is set.
    num_nans_in_logits: dict[str, int] = field(default_factory=dict)
    #: By request id, for requests with `return_routed_experts`. The entries belong to the tokens
    #: that this step ran.
    routed_experts: dict[str, RoutedExperts] = field(default_factory=dict)
    #: By request id, for requests whose prompt ended in this step, on a pooling model. The values
    #: are float32, little endian.
    pooler_output: dict[str, bytes] = field(default_factory=dict)
    connector: ConnectorOutput = field(default_factory=ConnectorOutput)


@dataclass(slots=True)
class PendingOutput:
    """The results of one step whose sampled tokens are not on the host yet."""

    #: Returns the token of each request that sampled, when the tokens are on the host.
    wait_for_tokens: Callable[[], dict[str, int]]
    connector: ConnectorOutput = field(default_factory=ConnectorOutput)

    def result(self) -> ModelRunnerOutput:
        """Wait for the tokens and return the results. Any thread may call this method."""
        return ModelRunnerOutput(self.wait_for_tokens(), connector=self.connector)
