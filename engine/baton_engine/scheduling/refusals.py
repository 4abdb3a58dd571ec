"""Refusals: requests that the scheduler does not accept, and the output that reports a refusal."""

from __future__ import annotations

from baton_engine.scheduling.groups.beams import root_id
from baton_engine.scheduling.parts import SchedulerParts
from baton_protocol.messages import EngineCoreOutput, EngineCoreRequest, ErrorCode, FinishReason


class RequestRefusedError(Exception):
    """The scheduler does not accept the request."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_request(request: EngineCoreRequest, parts: SchedulerParts) -> None:
    """Check that the scheduler can accept a request now.

    Raises:
        RequestRefusedError: it cannot.
    """
    request_id, transfer = request.request_id, request.kv_transfer
    if request_id in parts.requests:
        raise RequestRefusedError(ErrorCode.INVALID, f"request id {request_id} is already in use")
    if _is_taken_by_beams(request, parts):
        raise RequestRefusedError(
            ErrorCode.INVALID, f"request id {request_id} could be that of a beam; use another"
        )
    _refuse_what_never_fits(request, parts)
    if transfer is not None and transfer.transfer_id in parts.handoff:
        raise RequestRefusedError(
            ErrorCode.INVALID, f"transfer id {transfer.transfer_id} is already in use"
        )
    if parts.draining:
        raise RequestRefusedError(
            ErrorCode.DRAINING, "this engine is draining; send the request to another one"
        )
    num_queued = parts.queues.num_without_memory + len(parts.grammars)
    if num_queued >= parts.config.max_queue:
        raise RequestRefusedError(
            ErrorCode.OVERLOADED, f"{num_queued} requests are waiting already; retry later"
        )


def _is_taken_by_beams(request: EngineCoreRequest, parts: SchedulerParts) -> bool:
    """Return whether a beam has, or could get, the id of the request, or the reverse."""
    root = parts.requests.get(root_id(request.request_id))
    if root is not None and root.beams is not None:
        return True
    # Looks at all requests, but only for a beam search.
    return bool(request.sampling_params.beam_width) and any(
        root_id(other) == request.request_id for other in parts.requests
    )


def _refuse_what_never_fits(request: EngineCoreRequest, parts: SchedulerParts) -> None:
    """Refuse a request that exceeds a limit of this engine, so that it could never run."""
    config, pool = parts.config, parts.kv.pool
    num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
    width = request.sampling_params.beam_width
    if num_tokens >= parts.max_model_len:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt and generated tokens leave no room for another: "
            f"the maximum length is {parts.max_model_len} tokens in all",
        )
    if not config.enable_chunked_prefill and num_tokens > config.max_num_batched_tokens:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt and generated tokens exceed the "
            f"{config.max_num_batched_tokens} tokens of a step, and this engine does not chunk "
            "prompts; raise max_num_batched_tokens, or set enable_chunked_prefill",
        )
    if width > parts.max_num_seqs:
        raise RequestRefusedError(
            ErrorCode.INVALID,
            f"beam_width={width} exceeds the {parts.max_num_seqs} sequences that run at a time; "
            "raise max_num_seqs",
        )
    # Beams share full blocks, and each writes one of its own.
    num_blocks = num_tokens // parts.kv.block_size + width
    if num_blocks > pool.num_blocks:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt tokens and one more for each of {width} beams need "
            f"{num_blocks} KV blocks: "
            f"this engine has {pool.num_blocks}",
        )


def refusal_of(request: EngineCoreRequest, code: ErrorCode, message: str) -> EngineCoreOutput:
    """Build the only output of a refused request."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        token_offset=len(request.generated_token_ids),
        finish_reason=FinishReason.LENGTH if code is ErrorCode.LENGTH else FinishReason.ERROR,
        error=message,
        error_code=code,
    )
