"""Refusals: requests that can never fit, and the output that reports a refusal."""

from __future__ import annotations

from baton_engine.kv_cache.manager import KVCacheManager
from baton_protocol.config import SchedulerConfig
from baton_protocol.messages import EngineCoreOutput, EngineCoreRequest, ErrorCode, FinishReason


class RequestRefusedError(Exception):
    """The scheduler does not accept the request."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the output that refuses the request."""
        return FinishReason.LENGTH if self.code is ErrorCode.LENGTH else FinishReason.ERROR


def refuse_what_never_fits(
    request: EngineCoreRequest,
    config: SchedulerConfig,
    kv: KVCacheManager,
    *,
    max_model_len: int,
    max_num_seqs: int,
) -> None:
    """Refuse a request that no amount of waiting would let run.

    Raises:
        RequestRefusedError: it exceeds a limit of this engine.
    """
    num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
    width = request.sampling_params.beam_width
    if num_tokens >= max_model_len:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt and generated tokens leave no room for another: "
            f"the maximum length is {max_model_len} tokens in all",
        )
    if not config.enable_chunked_prefill and num_tokens > config.max_num_batched_tokens:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt and generated tokens exceed the "
            f"{config.max_num_batched_tokens} tokens of a step, and this engine does not chunk "
            "prompts; raise max_num_batched_tokens, or set enable_chunked_prefill",
        )
    if width > max_num_seqs:
        raise RequestRefusedError(
            ErrorCode.INVALID,
            f"beam_width={width} exceeds the {max_num_seqs} sequences that run at a time; "
            "raise max_num_seqs",
        )
    # Beams share full blocks, and each writes one of its own.
    num_blocks = num_tokens // kv.block_size + width
    if num_blocks > kv.pool.num_blocks:
        raise RequestRefusedError(
            ErrorCode.LENGTH,
            f"{num_tokens} prompt tokens and one more for each of {width} beams need "
            f"{num_blocks} KV blocks: "
            f"this engine has {kv.pool.num_blocks}",
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
