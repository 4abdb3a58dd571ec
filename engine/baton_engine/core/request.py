"""A request inside the engine, and the queue it waits in."""

from __future__ import annotations

import enum
import heapq
import itertools

from baton_engine.core.block_pool import Block
from baton_engine.protocol.block_hash import BlockHash
from baton_engine.protocol.messages import EngineCoreRequest, FinishReason, KVSide, PrefillResult

_sequence = itertools.count()


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Nothing but memory, a slot and budget is missing. Preempted requests are here, too."""
    WAITING_FOR_REMOTE_KV = enum.auto()
    """Its prompt's KV is computed elsewhere: waits for memory, then for the blocks, then for the first token."""
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One sequence. Written by the scheduler; `blocks` and the hash fields by the KV cache manager."""

    def __init__(self, core_request: EngineCoreRequest) -> None:
        self.request_id = core_request.request_id
        self.sampling_params = core_request.sampling_params
        self.sample_index = core_request.sample_index
        self.cache_salt = core_request.cache_salt
        self.lora_name = core_request.lora_name
        self.kv_transfer = core_request.kv_transfer
        self.token_ids = [*core_request.prompt_token_ids, *core_request.generated_token_ids]
        """All known tokens: prompt, then generated."""
        self.num_prompt_tokens = len(core_request.prompt_token_ids)
        self.num_arrival_tokens = len(self.token_ids)
        """Known when the request came; what a KV transfer covers."""
        self.order = (core_request.priority, core_request.arrival_time, next(_sequence))
        """Smaller runs first and is preempted last."""

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in `blocks`."""
        self.num_preemptions = 0
        self.prefill_result: PrefillResult | None = None
        self.in_worker = False
        """The worker has its tokens and block table."""

        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when it first started."""
        self.num_remote_tokens = 0
        """Prompt tokens whose KV came from the peer."""
        self.started = False
        """Has had blocks; its prompt is in the counters."""
        self.has_output = False

        self.blocks: list[Block] = []
        self.block_hashes: list[BlockHash] = []
        self.num_cached_blocks = 0
        """Leading blocks already offered to the prefix cache."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

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

    def stop_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Whether the last generated token ends the request, and why."""
        params, token_id = self.sampling_params, self.token_ids[-1]
        if self.num_generated_tokens >= params.min_tokens and (
            token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)
        ):
            return FinishReason.STOP
        if params.max_tokens is not None and self.num_generated_tokens >= params.max_tokens:
            return FinishReason.LENGTH
        if self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} tokens)"


class RequestQueue:
    """Requests by `order`. Removal from the middle is lazy: the heap entry dies when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def push(self, request: Request) -> None:
        assert request.request_id not in self._members
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The first request, or None."""
        while self._heap and self._heap[0][1] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Takes the first request. Raises IndexError if there is none."""
        request = self.peek()
        if request is None:
            raise IndexError("queue is empty")
        heapq.heappop(self._heap)
        del self._members[request.request_id]
        return request

    def discard(self, request: Request) -> None:
        """Takes `request` out, wherever it stands, if it is in."""
        if request in self:
            del self._members[request.request_id]
