"""Validates a request in the engine that receives it, before the scheduler queues it.

`SamplingParams.validate` checks the sampling parameters alone. The gateway calls this method as
well, so that an error names the field of the HTTP request. The checks here need other fields of the
request, or the engine's vocabulary, KV role or rank.
"""

from __future__ import annotations

import itertools

from baton_engine.scheduling.request_limits import RequestRefusedError
from baton_protocol.engine_messages import EngineCoreRequest, ErrorCode, KVSide, KVTransferParams
from baton_protocol.options.config import KVRole
from baton_protocol.pooling_params import NO_SAMPLING, Task

#: Maximum length of a request id, transfer id or group id, in characters.
MAX_ID_LENGTH = 256

#: KV roles of the engines that can run each side of a transfer.
_ROLES = {
    KVSide.PRODUCE: (KVRole.PRODUCER, KVRole.BOTH),
    KVSide.CONSUME: (KVRole.CONSUMER, KVRole.BOTH),
}


def validate_request(
    request: EngineCoreRequest,
    *,
    vocab_size: int,
    kv_role: KVRole,
    data_parallel_rank: int = 0,
    task: Task = Task.GENERATE,
    vector_size: int = 0,
) -> None:
    """Check that this engine can run a request.

    Args:
        vector_size: number of entries in the vector that a pooling model returns for a prompt.

    Raises:
        ValueError: a field is out of bounds, or does not fit another field or this engine. The
            message names the field.
        RequestRefusedError: the request is for another data-parallel rank.
    """
    if not 0 < len(request.request_id) <= MAX_ID_LENGTH:
        raise ValueError(
            f"request_id must have 1 to {MAX_ID_LENGTH} characters, got {len(request.request_id)}"
        )
    _validate_tokens(request, vocab_size)
    _validate_sampling(request, vocab_size)
    _validate_task(request, task, vector_size)
    if request.data_parallel_rank not in (None, data_parallel_rank):
        # The rank may have changed after the client sent the request.
        raise RequestRefusedError(
            ErrorCode.DRAINING,
            f"data_parallel_rank is {request.data_parallel_rank}, but this engine is rank "
            f"{data_parallel_rank}; send the request to that rank, or leave the field out",
        )
    if request.group_id:
        _validate_group_member(request)
    if request.sampling_params.beam_width:
        _validate_beam_search(request)
    if request.arrival_time != request.arrival_time:
        raise ValueError("arrival_time must be a number, got NaN")
    if request.kv_transfer is not None:
        _validate_transfer(request, request.kv_transfer, kv_role)


def _validate_task(request: EngineCoreRequest, task: Task, vector_size: int) -> None:
    params = request.pooling_params
    if (params is None) != (task is Task.GENERATE):
        does = "generates text" if task is Task.GENERATE else "pools prompts"
        raise ValueError(
            f"this engine {does} (task {task}): it takes "
            f"{'no requests' if task is Task.GENERATE else 'only requests'} with pooling_params"
        )
    if params is None:
        return
    params.validate(task, vector_size)
    if request.sampling_params != NO_SAMPLING or request.generated_token_ids or request.group_id:
        raise ValueError(
            "a request with pooling_params has the sampling parameters NO_SAMPLING, and neither "
            "generated_token_ids nor a group_id"
        )


def _validate_tokens(request: EngineCoreRequest, vocab_size: int) -> None:
    if not request.prompt_token_ids:
        raise ValueError("prompt_token_ids must not be empty")
    for name in ("prompt_token_ids", "generated_token_ids"):
        token_ids = getattr(request, name)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            raise ValueError(
                f"{name} must be in [0, {vocab_size}), got {min(token_ids)} to {max(token_ids)}; "
                "is this the tokenizer of another model?"
            )


def _validate_sampling(request: EngineCoreRequest, vocab_size: int) -> None:
    params, num_generated = request.sampling_params, len(request.generated_token_ids)
    params.validate()
    if params.max_tokens is not None and num_generated >= params.max_tokens:
        raise ValueError(
            f"max_tokens={params.max_tokens} is used up by {num_generated} generated_token_ids"
        )
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_token_ids": itertools.chain.from_iterable(params.bad_words_token_ids or ()),
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} must name token ids in [0, {vocab_size}), got {token_id}")


def _validate_transfer(
    request: EngineCoreRequest, transfer: KVTransferParams, kv_role: KVRole
) -> None:
    if kv_role not in _ROLES[transfer.side]:
        raise ValueError(
            f"kv_transfer.side is {transfer.side.name}, but this engine's kv_transfer.role is "
            f"{kv_role.value}; send the request to a pod of the other role"
        )
    if not 0 < len(transfer.transfer_id) <= MAX_ID_LENGTH:
        raise ValueError(f"kv_transfer.transfer_id must have 1 to {MAX_ID_LENGTH} characters")
    if not transfer.peer_instance_id:
        raise ValueError("kv_transfer.peer_instance_id must name the other engine's instance")
    params = request.sampling_params
    if transfer.side is KVSide.PRODUCE:
        num_wanted = len(request.generated_token_ids) + 1
        if params.max_tokens != num_wanted:
            # Further tokens would be written to the partial last block while the peer reads it.
            # They would also need memory, although the request cannot be preempted.
            raise ValueError(
                f"a PRODUCE request samples one token: max_tokens must be {num_wanted}, "
                f"got {params.max_tokens}"
            )
        return
    if params.prompt_logprobs is not None:
        raise ValueError(
            "prompt_logprobs needs the prompt computed here; "
            "it cannot be combined with kv_transfer CONSUME"
        )
    if not (transfer.remote_host and 0 < transfer.remote_port < 65536):
        raise ValueError(
            "kv_transfer.remote_host and remote_port must name the producer's side channel"
        )


def _validate_group_member(request: EngineCoreRequest) -> None:
    """Check a request that is one of several samples of the same prompt.

    The scheduler checks that the prompts of all samples are equal.
    """
    if len(request.group_id) > MAX_ID_LENGTH:
        raise ValueError(
            f"group_id must have at most {MAX_ID_LENGTH} characters, got {len(request.group_id)}"
        )
    if request.generated_token_ids:
        raise ValueError(
            "generated_token_ids must be empty in a request with a group_id; "
            "continue the request alone"
        )
    if request.kv_transfer is not None and request.kv_transfer.side is KVSide.PRODUCE:
        raise ValueError(
            "kv_transfer PRODUCE cannot be combined with group_id: "
            "one request computes the prompt of all samples"
        )


def _validate_beam_search(request: EngineCoreRequest) -> None:
    """Check a request for a beam search.

    A beam search cannot start from generated tokens, use KV transfer, or be one of several samples.
    """
    if request.kv_transfer is not None:
        raise ValueError(
            "kv_transfer cannot be combined with beam_width; "
            "beam search prefills and decodes in one engine"
        )
    if request.generated_token_ids:
        raise ValueError(
            "generated_token_ids must be empty with beam_width: "
            "a beam search starts from its prompt"
        )
    if request.group_id or request.sample_index:
        raise ValueError(
            "group_id and sample_index cannot be combined with beam_width: "
            "a beam search has one output with all beams"
        )
