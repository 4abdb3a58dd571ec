"""Checks whether the scheduler can accept a request, and builds the output of a refusal."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from baton_engine.kv_cache.kv_cache_manager import KVCacheManager
from baton_engine.scheduling.request import Request, root_id
from baton_protocol.engine_messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
)
from baton_protocol.options.config import SchedulerConfig


class RequestRefusedError(Exception):
    """The scheduler does not accept the request."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestLimits(NamedTuple):
    """Limits on the size of a request, and on the numbers of running and waiting requests."""

    #: Limit of prompt plus generated tokens.
    max_model_len: int
    #: Limit on the sequences that run at the same time.
    max_num_seqs: int
    #: Length of the longest prompt that one step can run. None: prompts are chunked.
    max_step_tokens: int | None
    num_blocks: int
    block_size: int
    max_queue: int

    @classmethod
    def of(cls, config: SchedulerConfig, kv: KVCacheManager, max_model_len: int) -> RequestLimits:
        """Return the limits that follow from a configuration and the size of the KV cache.

        Raises:
            ValueError: `max_model_len` tokens do not fit in the KV cache.
        """
        if max_model_len > kv.pool.num_blocks * kv.block_size:
            raise ValueError(
                f"max_model_len={max_model_len} does not fit in the KV cache "
                f"of {kv.pool.num_blocks} blocks of {kv.block_size} tokens"
            )
        budget = config.max_num_batched_tokens
        return cls(
            max_model_len,
            # Each running sequence needs budget for one token.
            max_num_seqs=min(config.max_num_seqs, budget),
            max_step_tokens=None if config.enable_chunked_prefill else budget,
            num_blocks=kv.pool.num_blocks,
            block_size=kv.block_size,
            max_queue=config.max_queue,
        )


def check_request(
    request: EngineCoreRequest,
    limits: RequestLimits,
    *,
    requests: Mapping[str, Request],
    transfer_ids: Container[str],
    num_queued: int,
    draining: bool,
) -> None:
    """Check that the scheduler can accept a request now.

    Args:
        requests: all unfinished requests, by id.
        transfer_ids: ids of the KV transfers that have not ended.
        num_queued: number of waiting requests.

    Raises:
        RequestRefusedError: the scheduler cannot accept the request.
    """
    request_id, transfer = request.request_id, request.kv_transfer
    if request_id in requests:
        raise RequestRefusedError(ErrorCode.INVALID, f"request id {request_id} is already in use")
    if _is_taken_by_beams(request, requests):
        raise RequestRefusedError(
            ErrorCode.INVALID, f"request id {request_id} could be the id of a beam; use another id"
        )
    _check_size(request, limits)
    if transfer is not None and transfer.transfer_id in transfer_ids:
        raise RequestRefusedError(
            ErrorCode.INVALID, f"transfer id {transfer.transfer_id} is already in use"
        )
    if draining:
        raise RequestRefusedError(
            ErrorCode.DRAINING, "this engine is draining; send the request to another engine"
        )
    if num_queued >= limits.max_queue:
        raise RequestRefusedError(
            ErrorCode.OVERLOADED, f"{num_queued} requests are waiting already; retry later"
        )


def _is_taken_by_beams(request: EngineCoreRequest, requests: Mapping[str, Request]) -> bool:
    """Return whether accepting `request` could give a beam and a request the same id.

    The id of `request` could belong to a beam of an accepted search. If `request` is a beam search,
    one of its beams could get the id of an accepted request.
    """
    root = requests.get(root_id(request.request_id))
    if root is not None and root.beams is not None:
        return True
    # Only a beam search pays for this pass over all requests.
    return bool(request.sampling_params.beam_width) and any(
        root_id(other) == request.request_id for other in requests
    )


def _check_size(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """Raise RequestRefusedError if the request could never run within the limits of this engine."""
    num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
    width = request.sampling_params.beam_width
    # At least one generated token must fit after a prompt, but no token follows a pooled prompt.
    longest = limits.max_model_len - (request.pooling_params is None)
    if num_tokens > longest:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt and generated tokens are more than {longest}: the maximum "
            f"length is {limits.max_model_len} tokens in all",
        )
    if limits.max_step_tokens is not None and num_tokens > limits.max_step_tokens:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt and generated tokens exceed the {limits.max_step_tokens} tokens "
            "of a step, and this engine does not chunk prompts; raise max_num_batched_tokens, "
            "or set enable_chunked_prefill",
        )
    if width > limits.max_num_seqs:
        raise RequestRefusedError(
            ErrorCode.INVALID,
            f"beam_width={width} exceeds the {limits.max_num_seqs} sequences that run at a time; "
            "raise max_num_seqs",
        )
    # Beams share full blocks, and each beam writes to a block of its own.
    num_blocks = num_tokens // limits.block_size + width
    if num_blocks > limits.num_blocks:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt and generated tokens, and one more for each of {width} beams, "
            f"need {num_blocks} KV blocks, but this engine has {limits.num_blocks}; "
            "use fewer beams or a shorter prompt",
        )


def refusal_of(request: EngineCoreRequest, code: ErrorCode, message: str) -> EngineCoreOutput:
    """Build the output that reports a refused request to its client."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        token_offset=len(request.generated_token_ids),
        finish_reason=FinishReason.LENGTH if code is ErrorCode.LENGTH else FinishReason.ERROR,
        error=message,
        error_code=code,
    )
