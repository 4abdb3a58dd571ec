"""Messages between an engine and its clients (msgspec over ZMQ).

The engine binds a ROUTER. A client connects one DEALER per engine instance. After ZMQ's own routing
frame a message has three frames, in both directions:

    type            1 byte
    instance id     ASCII, empty only in HELLO and REFUSED
    payload         msgpack of the struct named below

    client                               engine
    HELLO           Hello             ->
                                      <- INIT       Init                 also while the model loads
                                      <- INIT       Init                 with the hash, before READY
                                      <- READY      Ready                requests are accepted
    ADD             EngineCoreRequest ->
                                      <- OUTPUTS    EngineCoreOutputs
    ABORT           list[str]         ->                                 request ids
    PREFILL_RESULT  PrefillResult     ->                                 to the decode side
    UTILITY         UtilityRequest    ->
                                      <- OUTPUTS    EngineCoreOutputs(utility_output=...)
    PING            Ping              ->
                                      <- PONG       Pong                 from the I/O thread
                                      <- REFUSED    Refused              version, instance or form
                                      <- DEAD       Dead                 the engine loop failed
                                      <- KV_EVENTS  KVEventBatch         to subscribers

A message with another instance id is refused, so a message for a dead process never reaches its
successor.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from baton_protocol.sampling import SamplingParams

PROTOCOL_VERSION = 1


class EngineCoreRequestType(bytes, enum.Enum):
    """First frame of a message to the engine."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    #: Internal to the engine process: the executor's failure, put on the input queue.
    EXECUTOR_FAILED = b"\x04"
    #: Internal to the engine process: wakes the loop after a KV load or a signal.
    WAKEUP = b"\x05"
    PREFILL_RESULT = b"\x06"
    HELLO = b"\x10"
    PING = b"\x11"


class EngineCoreResponseType(bytes, enum.Enum):
    """First frame of a message from the engine."""

    OUTPUTS = b"\x00"
    INIT = b"\x10"
    PONG = b"\x11"
    READY = b"\x12"
    REFUSED = b"\x13"
    DEAD = b"\x14"
    KV_EVENTS = b"\x15"


class FinishReason(enum.IntEnum):
    """Why a request ended. Integers, because one travels with every finished output."""

    #: A stop token was sampled (EOS or one of stop_token_ids).
    STOP = 0
    #: max_tokens or max_model_len was reached.
    LENGTH = 1
    #: The client aborted the request.
    ABORT = 2
    #: The engine failed; see `EngineCoreOutput.error`.
    ERROR = 3
    #: The output repeats itself, as `SamplingParams.repetition_detection` defines it.
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class ErrorCode(enum.IntEnum):
    """Kind of a failure. Clients decide by it whether to try another pod."""

    #: The request itself is wrong: no pod will take it. If a field of SamplingParams is wrong, the
    #: error begins with its name, from which clients find the field of their own request.
    INVALID = 0
    #: This pod takes no new requests; send it elsewhere.
    DRAINING = 1
    #: The queue is full; retry later or elsewhere.
    OVERLOADED = 2
    #: The step failed; another pod may succeed.
    INTERNAL = 3
    #: KV blocks could not be fetched, and load_failure_policy is fail.
    KV_LOAD = 4
    #: The request can never fit this engine: it is longer than max_model_len, or needs more than
    #: the KV memory. The finish_reason is LENGTH.
    LENGTH = 5


class _Wire(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Base of all wire structs: arrays, untracked by the GC.

    New fields go last and have a default.
    """


class Hello(_Wire):
    protocol_version: int
    client_id: str
    #: Whether to send KV_EVENTS. The engine publishes them if config.cache.enable_kv_events is set.
    kv_events: bool = False


class Init(_Wire):
    protocol_version: int
    #: Drawn at process start. A restarted pod is a new instance.
    instance_id: str
    #: Equal on engines that may exchange KV blocks and continue each other's requests. Empty while
    #: the model is loaded.
    compatibility_hash: str
    #: Topology generation (elastic groups).
    generation: int = 0
    #: Configured transport of KV blocks, which engines that exchange them share.
    kv_transport: str = ""


class Ready(_Wire):
    max_model_len: int
    num_blocks: int
    block_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1


class Ping(_Wire):
    sequence: int


class Pong(_Wire):
    sequence: int
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    #: Fraction of blocks in use, 0 to 1.
    kv_cache_usage: float = 0.0


class Refused(_Wire):
    reason: str
    request_id: str = ""


class Dead(_Wire):
    reason: str


class KVSide(enum.IntEnum):
    #: Prefill here, keep the blocks for the peer.
    PRODUCE = 0
    #: Fetch the prompt's blocks from the peer, then decode.
    CONSUME = 1


class KVTransferParams(_Wire):
    """The KV hand-off of one request. Each engine receives one that names the other engine."""

    side: KVSide
    #: The same on both sides, unique per attempt.
    transfer_id: str
    #: Instance id of the other engine. Other instances are refused.
    peer_instance_id: str
    #: CONSUME only: the producer's address.
    remote_host: str = ""
    #: CONSUME only: the port of the producer's KV side channel.
    remote_port: int = 0


class EngineCoreRequest(_Wire):
    """One sequence to continue, with all data that a pod needs to take it over from another pod."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    #: Tokens already generated elsewhere. They count as output: penalties, min_tokens and noise
    #: positions replay from them.
    generated_token_ids: list[int] = []
    #: Which of the n samples of one client request this is; part of the noise key.
    sample_index: int = 0
    #: Wall clock of the gateway, seconds; orders requests, never compared with a local clock.
    arrival_time: float = 0.0
    #: Lower runs first, then arrival.
    priority: int = 0
    #: Requests with different salts share no prefix-cache block.
    cache_salt: str = ""
    kv_transfer: KVTransferParams | None = None
    data_parallel_rank: int | None = None
    #: W3C trace context of the caller. No component sets or reads it. It is reserved for tracing.
    trace_headers: dict[str, str] | None = None
    #: Samples of one prompt have the same group id. The engine computes the prompt once. They share
    #: its blocks (copy-on-write) and are swapped together. They have equal prompts, no generated
    #: tokens and no kv_transfer. Empty: no group.
    group_id: str = ""


class PrefillResult(_Wire):
    """How the prefill stage of a request ended.

    The gateway sends it to the decode side, once per CONSUME request.
    """

    request_id: str
    #: Sampled by the prefill side, already sent to the client. Empty: the decode side samples from
    #: position 0 itself.
    token_ids: list[int] = []
    #: Non-empty: the prefill side failed, and the decode side computes the missing blocks.
    error: str = ""


class TokenLogprobs(_Wire):
    token_id: int
    logprob: float
    #: 1 for the most likely token.
    rank: int = 0
    #: The most likely tokens as (token id, logprob), best first; as many as were requested.
    top: list[tuple[int, float]] = []


#: Logprobs of consecutive prompt tokens. A prompt's first token has none: nothing predicts it.
PromptLogprobs = list[TokenLogprobs]


class RoutedExperts(_Wire):
    """The experts that computed each token, in a mixture-of-experts model."""

    #: (tokens, sparse layers, experts per token).
    shape: tuple[int, int, int]
    #: uint16, little endian, in C order.
    expert_ids: bytes


class BeamOutput(_Wire):
    """One finished beam."""

    token_ids: list[int]
    cumulative_logprob: float
    #: cumulative_logprob / number of tokens ** length_penalty: what beams are ordered by.
    score: float
    finish_reason: FinishReason
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None


class EngineCoreEventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(_Wire):
    """Something that happened to a request inside the engine."""

    type: EngineCoreEventType
    #: `time.monotonic()` of the engine process, in seconds. Compare it within one process only.
    timestamp: float


class EngineCoreOutput(_Wire):
    request_id: str
    new_token_ids: list[int]
    #: Index of the first of new_token_ids in the generated sequence, generated_token_ids included.
    #: It reveals gaps and repeats.
    token_offset: int = 0
    finish_reason: FinishReason | None = None
    #: The stop token that ended the request, if any: the last of new_token_ids.
    stop_token_id: int | None = None
    error: str = ""
    error_code: ErrorCode | None = None
    new_logprobs: list[TokenLogprobs] | None = None
    #: Prompt tokens taken from the prefix cache; set on the first output.
    num_cached_tokens: int = 0
    #: Events since the last output.
    events: list[EngineCoreEvent] | None = None
    #: Logprobs from prompt position 1 on, all on the first output with a token.
    prompt_logprobs: PromptLogprobs | None = None
    #: Beam search: all finished beams, best first. The request has no other output.
    beams: list[BeamOutput] | None = None
    num_nans_in_logits: int = 0
    #: Experts of all tokens computed since the last output.
    routed_experts: RoutedExperts | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class UtilityRequest(_Wire):
    call_id: int
    #: One of the engine's allow-list.
    method: str
    #: msgpack values, converted to the method's annotated types.
    args: list[Any] = []


class UtilityOutput(_Wire):
    call_id: int
    failure_message: str | None = None
    #: The method's result, a msgpack value.
    result: Any = None


class EngineCoreOutputs(_Wire):
    outputs: list[EngineCoreOutput] = []
    utility_output: UtilityOutput | None = None


class BlocksStored(_Wire, tag="stored"):
    """Consecutive blocks of one sequence became findable in the prefix cache."""

    block_hashes: list[bytes]
    #: Hash of the block before the first; the root hash if there is none.
    parent_hash: bytes
    block_size: int


class BlocksRemoved(_Wire, tag="removed"):
    """Blocks were evicted."""

    block_hashes: list[bytes]


class AllBlocksCleared(_Wire, tag="cleared"):
    """The prefix cache was reset."""


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class KVEventBatch(_Wire):
    #: Grows by one per batch. After a gap, the state of this engine's cache is unknown.
    sequence: int
    events: list[KVEvent]
