"""One sample of one prompt, and the group of samples that share a prompt.

The gateway keeps the generated tokens of every sequence, so that another engine can continue the
sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import msgspec

from baton_gateway.routing.pool_member import PoolMember
from baton_protocol.engine_messages import EngineCoreRequest, KVSide, KVTransferParams
from baton_protocol.pooling_params import PoolingParams
from baton_protocol.sampling_params import SamplingParams

#: Resumed samples wait this long for the first of them to compute their prompt.
PROMPT_WAIT_S = 10.0


class Placement:
    """The decode engine chosen for one sequence, or for the samples of a `SampleGroup`.

    Args:
        member: the engine.
        group_id: id of the group whose samples share the placement; empty for one sequence.
    """

    def __init__(self, member: PoolMember, group_id: str = "") -> None:
        self.member = member
        #: `EngineClient.ready_epoch` of the engine. It changes when the engine is ready again.
        self.ready_epoch = member.ready_client.ready_epoch
        self._group_id = group_id
        #: Whether a sample was sent to this engine. The first sample computes the prompt there, or
        #: loads the prompt's KV.
        self.has_sample = False
        #: Set when a sample has a token from this engine, or has ended. Before that the prefix
        #: cache may not yet hold the prompt's blocks.
        self.prompt_computed = asyncio.Event()

    @property
    def is_available(self) -> bool:
        """Whether the engine accepts requests and was not lost since it was chosen."""
        return self.member.is_available and self.member.ready_client.ready_epoch == self.ready_epoch

    async def join(self, sequence: Sequence) -> str:
        """Record that `sequence` will be sent to the engine, and return the group id to send.

        If `sequence` is resumed and an earlier sample was sent to the engine, wait until the engine
        has computed the prompt. The wait takes at most PROMPT_WAIT_S.

        Returns:
            The id of the group with which the sequence is sent; empty if it is sent alone.
        """
        is_first, self.has_sample = not self.has_sample, True
        if not sequence.has_begun:
            return self._group_id
        if not is_first:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROMPT_WAIT_S):
                    await self.prompt_computed.wait()
        return ""


@dataclass
class SampleGroup:
    """The samples of one prompt. They run on one engine, so that the prompt is computed once.

    - The group's engine is chosen for the first sample that is sent. After a failure that affects
      the whole group, such as the loss of the engine, the next engine is chosen for the first
      sample that retries. The other samples follow. After any other failure, only the failed sample
      moves (`Placer._place_decode`).
    - Only the first sample may have a prefill stage, so the prompt's blocks are transferred once
      (`Placer._pick_prefill`).
    - Samples without tokens are sent with the group's id, and share the prompt's KV blocks. The
      decode engine samples the first token of each, so PREFILL_RESULT has no token
      (`Dispatcher._first_token`). The decode engine loads the blocks even if the first sample ends
      with its first token.
    - Resumed samples already have tokens. They are sent without the group's id, because samples
      with the id must start right after the prompt. The first resumed sample computes the prompt.
      The others wait for this, for at most PROMPT_WAIT_S, and find the prompt's blocks in the
      prefix cache (`Placement.join`).
    """

    group_id: str
    #: Key: `ready_epoch` of the lost engine that the placement replaces; 0 for the first placement.
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
    group: SampleGroup | None = None  # None if no other sample shares its prompt
    data_parallel_rank: int | None = None  # as requested by the client
    generated_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    has_failed: bool = False  # whether an attempt has failed
    #: Set for a prompt of a pooling model, whose result is a vector.
    pooling_params: PoolingParams | None = None

    @property
    def has_begun(self) -> bool:
        """Whether tokens were generated. The client may already have received them."""
        return bool(self.generated_token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether max_tokens tokens were generated."""
        limit = self.sampling_params.max_tokens
        return limit is not None and len(self.generated_token_ids) >= limit

    @property
    def can_prefill_remotely(self) -> bool:
        """Whether a prefill engine may compute the prompt and sample the first token.

        False for a resumed sequence, for a beam search, for a prompt of a pooling model, and if
        prompt logprobs are requested.
        """
        params = self.sampling_params
        return not (
            self.has_begun
            or params.beam_width
            or params.prompt_logprobs is not None
            or self.pooling_params is not None
        )

    def request(
        self, attempt_id: str, kv: KVTransferParams | None, *, group_id: str = ""
    ) -> EngineCoreRequest:
        """Return the engine request that continues the sequence after the tokens so far.

        Args:
            attempt_id: id of the request at the engine.
            kv: the engine's side of the KV transfer; None if the request has no KV transfer.
            group_id: id of the group with which the request is sent; empty if it is sent alone.
        """
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
            pooling_params=self.pooling_params,
        )
