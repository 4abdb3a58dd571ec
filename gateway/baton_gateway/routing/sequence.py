"""One sample of one prompt, and the samples that share a prompt.

The gateway owns every sequence with the tokens generated so far. Engines own only the work on it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from baton_gateway.routing.member import PoolMember
from baton_protocol.messages import EngineCoreRequest, KVSide, KVTransferParams
from baton_protocol.sampling import SamplingParams


class Placement:
    """A decode engine that a sequence, or several samples of one prompt, are sent to."""

    def __init__(self, member: PoolMember) -> None:
        self.member = member
        self.readiness = member.ready_client.readiness
        #: Whether a resumed sample was sent to this engine.
        self.has_resumed_sample = False
        #: Set when a sample has a token from this engine, or has ended. Before that the prefix
        #: cache may not yet hold the prompt's blocks.
        self.prompt_computed = asyncio.Event()

    @property
    def is_available(self) -> bool:
        return self.member.is_available and self.member.ready_client.readiness == self.readiness


@dataclass
class SampleGroup:
    """The samples of one prompt, which run on one engine so that it computes the prompt once.

    The first sample to be sent picks the engine for all. When that engine is lost, the first sample
    to notice picks the next engine for all.
    """

    group_id: str
    #: By the readiness of the engine that was lost; 0 for the first placement.
    placements: dict[int, Placement] = field(default_factory=dict)
    #: Held while one sample waits for an engine.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Sequence:
    """One sample of one prompt, and the tokens generated so far.

    A beam search is one sequence whose output has beams.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # with max_tokens and seed set
    sample_index: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    group: SampleGroup | None = None  # None: the only sample of its prompt
    data_parallel_rank: int | None = None  # as requested by the client
    generated_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    failure: str = ""  # why the last engine failed; empty if none has

    @property
    def has_begun(self) -> bool:
        """Whether the client may have received some of its tokens."""
        return bool(self.generated_token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether max_tokens are generated."""
        limit = self.sampling_params.max_tokens
        return limit is not None and len(self.generated_token_ids) >= limit

    @property
    def can_prefill_remotely(self) -> bool:
        """Whether a prefill engine may compute the prompt and sample the first token.

        Not for beams, which share blocks and are chosen in one place. Not with prompt logprobs,
        which the decode engine needs. Not for a resumed sequence.
        """
        params = self.sampling_params
        return not self.has_begun and not params.beam_width and params.prompt_logprobs is None

    def request(
        self, attempt_id: str, kv: KVTransferParams | None, *, group_id: str = ""
    ) -> EngineCoreRequest:
        """Return all that an engine needs to run the sequence from its current token."""
        params = self.sampling_params
        if self.has_begun and params.prompt_logprobs is not None:  # sent with the first token
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        if kv is not None and kv.side is KVSide.PRODUCE:
            one_token = len(self.generated_token_ids) + 1
            params = msgspec.structs.replace(
                params, max_tokens=one_token, min_tokens=min(params.min_tokens, one_token)
            )
        return EngineCoreRequest(
            request_id=attempt_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling_params=params,
            generated_token_ids=list(self.generated_token_ids),
            sample_index=self.sample_index,
            arrival_time=self.arrival_time,
            priority=self.priority,
            cache_salt=self.cache_salt,
            kv_transfer=kv,
            group_id=group_id,
        )
