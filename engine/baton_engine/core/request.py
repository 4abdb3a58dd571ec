"""A request inside the engine: one sequence, or the root of a beam search whose beams are sequences of their own."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton_engine.core.block_pool import Block
from baton_engine.protocol.block_hash import BlockHash
from baton_engine.protocol.messages import (
    EngineCoreEvent,
    EngineCoreRequest,
    KVSide,
    PrefillResult,
    RoutedExperts,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from baton_engine.core.beam_group import BeamGroup
    from baton_engine.core.sample_group import SampleGroup
    from baton_engine.core.structured_output import Grammar

Order = tuple[int, float, int, int]
"""(priority, arrival, number of the group, number of the request)."""

_sequence = itertools.count()


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Nothing but memory, a slot and budget is missing."""
    WAITING_FOR_GRAMMAR = enum.auto()
    """Its structured output is being compiled."""
    WAITING_FOR_PROMPT = enum.auto()
    """Another member of its group computes their prompt."""
    WAITING_FOR_REMOTE_KV = enum.auto()
    """Its prompt's KV is computed elsewhere: waits for memory, then for the blocks, then for the first token."""
    WAITING_FOR_STEPS = enum.auto()
    """Preempted while steps of it were in flight: they come back first."""
    SWAPPED = enum.auto()
    """Preempted; its KV is in host memory."""
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """Written by the scheduler; `blocks`, `swapped_blocks` and the hash fields by the KV cache manager."""

    def __init__(self, core_request: EngineCoreRequest, *, root: Request | None = None) -> None:
        """
        Args:
            root: of the beam search that this sequence is a beam of.
        """
        self.request_id = core_request.request_id
        self.sampling_params = core_request.sampling_params
        self.sample_index = core_request.sample_index
        self.cache_salt = core_request.cache_salt
        self.lora_name = core_request.lora_name
        self.kv_transfer = core_request.kv_transfer
        self.root = root
        self.token_ids = [*core_request.prompt_token_ids, *core_request.generated_token_ids]
        """All known tokens: prompt, then generated."""
        self.num_prompt_tokens = len(core_request.prompt_token_ids)
        self.num_arrival_tokens = len(self.token_ids)
        """Known when the request came; what a KV transfer covers."""
        number = next(_sequence)
        self.order: Order = (core_request.priority, core_request.arrival_time, number, number)
        """Smaller runs first and is preempted last. Members of a group stand together."""
        self.group: SampleGroup | None = None
        self.beams: BeamGroup | None = None
        """Set for the root of a beam search: it runs nothing itself."""

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in `blocks` once all steps scheduled so far have run."""
        self.num_placeholders = 0
        """Tokens that steps in flight sample: they follow token_ids, and only the worker knows them."""
        self.num_in_flight = 0
        """Steps in flight that run tokens of it."""
        self.num_preemptions = 0
        """Tells a step that comes back whether the KV it wrote is still in `blocks`."""
        self.in_worker = False
        """The worker has its tokens and block table."""
        self.num_worker_tokens = 0
        """Tokens the worker was given when it took the request in."""
        self.num_worker_blocks = 0
        """Leading blocks whose ids the worker has."""

        self.prefill_result: PrefillResult | None = None
        self.grammar: Grammar | None = None
        self.num_grammar_tokens = 0
        """Generated tokens the grammar has accepted."""

        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache, or shared with another sample, when it first started."""
        self.num_remote_tokens = 0
        """Prompt tokens whose KV came from the peer."""
        self.started = False
        """Has had blocks; its prompt is in the counters."""
        self.has_output = False
        self.events: list[EngineCoreEvent] = []
        """Not told yet; so are the next two."""
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            [] if core_request.sampling_params.prompt_logprobs is not None else None
        )
        """None: not asked for, or told."""
        self.routed_experts: list[RoutedExperts] = []

        self.blocks: list[Block] = []
        self.swapped_blocks: list[Block] = []
        """Host blocks with its KV while it is swapped out."""
        self.block_hashes: list[BlockHash] = []
        self.num_cached_blocks = 0
        """Leading blocks already offered to the prefix cache."""

    @property
    def num_tokens(self) -> int:
        """Known ones."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Placeholders included: a request that is sampling always has one."""
        return len(self.token_ids) + self.num_placeholders - self.num_computed_tokens

    @property
    def max_seqs(self) -> int:
        """Places in the worker's batch that it may take."""
        return self.sampling_params.beam_width or 1

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]

    @property
    def produces(self) -> bool:
        return self.kv_transfer is not None and self.kv_transfer.side is KVSide.PRODUCE

    @property
    def consumes(self) -> bool:
        return self.kv_transfer is not None and self.kv_transfer.side is KVSide.CONSUME

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def sequences(self) -> Sequence[Request]:
        """What holds its KV: itself, or its beams."""
        return [self] if self.beams is None else self.beams.live

    def may_run_ahead(self, max_model_len: int) -> bool:
        """Whether a token may be computed before the one in front of it is known: lengths allow it, nothing else needs it."""
        params = self.sampling_params
        num_tokens = len(self.token_ids) + self.num_placeholders
        return (
            num_tokens < max_model_len
            and (params.max_tokens is None or num_tokens - self.num_prompt_tokens < params.max_tokens)
            and self.grammar is None
            and self.kv_transfer is None
        )

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
