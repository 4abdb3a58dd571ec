"""What the gateway owns: sequences, what has been generated of them, and where they have been."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from baton_gateway.pool import Member
from baton_protocol.messages import EngineCoreRequest, ErrorCode, KVSide, KVTransferParams
from baton_protocol.sampling import SamplingParams


class AttemptError(Exception):
    """This decode engine cannot go on; another may.

    Args:
        code: the engine's; None if it is lost: dead, or silent for too long.
    """

    def __init__(self, message: str, code: ErrorCode | None) -> None:
        super().__init__(message)
        self.code = code

    @property
    def reason(self) -> str:
        return "engine_lost" if self.code is None else self.code.name.lower()

    @property
    def is_of_engine(self) -> bool:
        """The engine went away or retires, with all it had; else it failed this one request."""
        return self.code in (None, ErrorCode.DRAINING)


class Placement:
    """A decode engine that a sequence, or several samples of one prompt, is sent to."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.readiness = member.ready_client.readiness
        self.prompt_sent = False
        """A sample that goes on there is on its way."""
        self.prompt_known = asyncio.Event()
        """It has a token, or has ended: its prompt's blocks are in the prefix cache, or never will be."""

    @property
    def available(self) -> bool:
        return self.member.available and self.member.ready_client.readiness == self.readiness


@dataclass
class SampleGroup:
    """Samples of one prompt. The first that is sent off picks the engine for all, which computes the prompt once; when that engine
    is lost, the first that notices picks another one for all."""

    group_id: str
    placements: dict[int, Placement] = field(default_factory=dict)
    """By the readiness of the engine that was lost; 0: the first one."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one of them waits for an engine."""


@dataclass
class Sequence:
    """One sample of one prompt, and what has been generated of it. A beam search is one sequence whose output has beams."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """With max_tokens and seed set."""
    sample_index: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    group: SampleGroup | None = None
    """None: it is alone."""
    data_parallel_rank: int | None = None
    """Asked for by the client."""
    generated_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    failure: str = ""
    """Why the last engine gave it up; it waits for another one, or runs there."""

    @property
    def begun(self) -> bool:
        """The client may have seen some of it."""
        return bool(self.generated_token_ids)

    @property
    def is_used_up(self) -> bool:
        """No token is left to generate."""
        limit = self.sampling_params.max_tokens
        return limit is not None and len(self.generated_token_ids) >= limit

    @property
    def may_take_leg(self) -> bool:
        """Whether another engine may compute its prompt and sample its first token. Beams share blocks and are chosen in one
        place, and a prompt's logprobs are needed where the answer is made; one that goes on elsewhere has no leg either."""
        params = self.sampling_params
        return not self.begun and not params.beam_width and params.prompt_logprobs is None

    def request(
        self, attempt_id: str, kv: KVTransferParams | None, *, group_id: str = ""
    ) -> EngineCoreRequest:
        """All that an engine needs to go on with it."""
        params = self.sampling_params
        if self.begun and params.prompt_logprobs is not None:  # they came with the first token
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


@dataclass
class Journey:
    """One sequence's way from engine to engine."""

    sequence: Sequence
    rank: int | None
    """The rank it may be sent to; None: any."""
    attempts: int = 0
    num_failures: int = 0
    """Attempts in a row that brought no token. Engines that retire or are full do not count: nothing is wrong with it."""
    failure: AttemptError | None = None
    """The last one."""
    excluded: set[int] = field(default_factory=set)
    """Engines that had it, by readiness."""
    config_hash: str | None = None
    """Of the engines that generated its tokens."""
    placement: Placement | None = None
    """The last one."""
    stalled_since: float = 0.0
    """Monotonic time of the first failure after which no token came."""

    @property
    def meets_overload(self) -> bool:
        """It has begun, and an engine has no room for it: it was accepted, so it waits instead of being refused."""
        failure = self.failure
        return failure is not None and failure.code is ErrorCode.OVERLOADED and self.sequence.begun

    def sent_to(self, placement: Placement) -> None:
        self.attempts += 1
        self.placement = placement
        self.excluded.add(placement.readiness)
        self.config_hash = placement.member.ready_client.init.config_hash

    def gave_up(self, error: AttemptError, *, progressed: bool) -> None:
        """The engine it was sent to brought it no further."""
        if progressed or self.failure is None:
            self.stalled_since = time.monotonic()
        self.failure = error
        self.sequence.failure = str(error)
        if progressed:
            self.num_failures = 0
        elif error.code is not ErrorCode.DRAINING and not self.meets_overload:
            self.num_failures += 1
        if self.sequence.begun or error.is_of_engine:
            self.rank = None  # the next generation may not have it, and what has begun matters more
