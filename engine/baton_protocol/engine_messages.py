"""Messages between an engine and its clients (msgspec over ZMQ).

The engine binds a ROUTER. A client connects one DEALER per engine instance. After ZMQ's own routing
frame a message has three frames, in both directions:

    type            1 byte
    instance id     ASCII, empty only in HELLO and REFUSED
    payload         msgpack of the struct named below

    client                               engine
    HELLO           ClientHello       ->
                                      <- INIT       Init                 also while the model loads
                                      <- INIT       Init                 with the compatibility hash
                                      <- READY      Ready                requests are accepted
    ADD             EngineCoreRequest ->
                                      <- OUTPUTS    EngineCoreOutputs
    ABORT           list[str]         ->                                 request ids
    PREFILL_RESULT  PrefillResult     ->                                 to the decode engine
    UTILITY         UtilityRequest    ->
                                      <- OUTPUTS    EngineCoreOutputs(utility_output=...)
    PING            Ping              ->
                                      <- PONG       Pong                 from the I/O thread
                                      <- REFUSED    RequestRefused       version, instance or format
                                      <- DEAD       Dead                 the engine loop failed
                                      <- KV_EVENTS  KVEventBatch         to subscribers

An engine refuses a message with the instance id of another instance. So a restarted engine never
handles a message for the process before it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from baton_protocol.pooling_params import PairFormat, PoolingParams, Task
from baton_protocol.sampling_params import SamplingParams

PROTOCOL_VERSION = 3


class EngineCoreRequestType(bytes, enum.Enum):
    """First frame of a message to the engine: the type of the message."""

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
    """First frame of a message from the engine: the type of the message."""

    OUTPUTS = b"\x00"
    INIT = b"\x10"
    PONG = b"\x11"
    READY = b"\x12"
    REFUSED = b"\x13"
    DEAD = b"\x14"
    KV_EVENTS = b"\x15"


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    #: A stop token was sampled (EOS or one of stop_token_ids).
    STOP = 0
    #: max_tokens or max_model_len was reached.
    LENGTH = 1
    #: The client aborted the request.
    ABORT = 2
    #: The request failed or was refused; see `EngineCoreOutput.error`.
    ERROR = 3
    #: The output repeats itself, as `SamplingParams.repetition_detection` defines it.
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class ErrorCode(enum.IntEnum):
    """Kind of a failure. Clients use the kind to decide whether to try another pod."""

    #: The request is invalid on every pod. For an invalid field of SamplingParams, the error begins
    #: with the field's name. Clients map this name to the field of their own request.
    INVALID = 0
    #: This pod takes no new requests. Send the request to another pod.
    DRAINING = 1
    #: The queue is full. Retry later, or on another pod.
    OVERLOADED = 2
    #: The step failed. Another pod may succeed.
    INTERNAL = 3
    #: KV blocks could not be fetched, and load_failure_policy is fail.
    KV_LOAD = 4
    #: The request can never fit this engine: it is longer than max_model_len, or needs more than
    #: the KV memory. The finish_reason is LENGTH.
    LENGTH = 5


class _Wire(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Base of all wire structs, which are encoded as arrays and not tracked by the GC.

    New fields go last and have a default.
    """


class ClientHello(_Wire):
    protocol_version: int
    client_id: str
    #: Whether the client subscribes to KV_EVENTS. The engine sends them only if
    #: config.cache.enable_kv_events is set.
    kv_events: bool = False


class Init(_Wire):
    protocol_version: int
    #: Random id, drawn at process start. A restarted pod is a new instance.
    instance_id: str
    #: Equal on engines that may exchange KV blocks and continue each other's requests. Empty while
    #: the model is loaded.
    compatibility_hash: str
    #: Configured transport of KV blocks. Engines that exchange blocks have the same transport.
    kv_transport: str = ""


class Ready(_Wire):
    max_model_len: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    #: What the engine does with prompts. It refuses requests for another task.
    task: Task = Task.GENERATE
    #: How two texts become a prompt. None: the model scores no pairs.
    pair_format: PairFormat | None = None


class Ping(_Wire):
    sequence: int


class Pong(_Wire):
    sequence: int
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    #: Fraction of blocks in use, 0 to 1.
    kv_cache_usage: float = 0.0
    #: The engine is paused or asleep, and admits no requests.
    paused: bool = False
    #: A sleep has freed the engine's memory. Its requests cannot continue before a wake-up.
    asleep: bool = False
    #: Seconds without progress of unfinished requests. It grows while the model loads, while a step
    #: or a call runs, and while a pause freezes requests. In an idle engine it is at most 1 s.
    stalled_s: float = 0.0
    #: Duration of the longest step of the last 10 to 20 minutes.
    longest_step_s: float = 0.0


class RequestRefused(_Wire):
    reason: str
    request_id: str = ""


class Dead(_Wire):
    reason: str


class KVSide(enum.IntEnum):
    """The role of an engine in the KV hand-off of a request."""

    #: Compute the prompt, and keep the blocks for the peer.
    PRODUCE = 0
    #: Fetch the prompt's blocks from the peer, then decode.
    CONSUME = 1


class KVTransferParams(_Wire):
    """Parameters of a request's KV hand-off, for the prefill or the decode engine."""

    side: KVSide
    #: Equal on both engines, and unique per attempt.
    transfer_id: str
    #: Instance id of the other engine. Other instances are refused.
    peer_instance_id: str
    #: CONSUME only: the producer's address.
    remote_host: str = ""
    #: CONSUME only: the port of the producer's KV side channel.
    remote_port: int = 0


#: Length of the text that identifies a client in `EngineCoreRequest.cache_salt`.
CLIENT_CHARS = 16


class EngineCoreRequest(_Wire):
    """Request to generate or continue one sequence, or to pool one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    #: Tokens that another pod already generated. They count as output for penalties, min_tokens and
    #: the positions of the sampling noise.
    generated_token_ids: list[int] = []
    #: Index of this sample among the n samples of a client's request. Part of the key of the
    #: sampling noise.
    sample_index: int = 0
    #: Time by the client's wall clock, in seconds. Used only to order requests, because the clocks
    #: of client and engine may differ.
    arrival_time: float = 0.0
    #: Lower values run first, then earlier arrivals.
    priority: int = 0
    #: Requests with different salts share no prefix-cache block and no compiled grammar. The first
    #: CLIENT_CHARS characters are the same in all requests of a client with an API key.
    cache_salt: str = ""
    #: None: this engine exchanges no KV blocks for the request.
    kv_transfer: KVTransferParams | None = None
    #: Rank of the engine that must run the request. None: any rank.
    data_parallel_rank: int | None = None
    #: Samples of one prompt have the same group id. The engine computes the prompt once. Samples
    #: share the prompt's blocks (copy-on-write) and are swapped together. Samples of a group have
    #: equal prompts and no generated tokens. The first sample may have kv_transfer with CONSUME.
    #: The other samples then wait for this load, and share the loaded blocks. Empty: no group.
    group_id: str = ""
    #: Set in a request to a pooling model. `sampling_params` is then `NO_SAMPLING`.
    pooling_params: PoolingParams | None = None


class PrefillResult(_Wire):
    """Result of a request's prefill stage.

    The gateway sends one PREFILL_RESULT for each request that fetches KV blocks (KVSide.CONSUME).
    The receiver is the decode engine.
    """

    request_id: str
    #: Tokens that the prefill engine sampled and the client already has. Empty: the decode engine
    #: samples from position 0.
    token_ids: list[int] = []
    #: Non-empty: the prefill engine failed, and the decode engine computes the missing blocks.
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
    """The experts to which each token was routed, in a mixture-of-experts model."""

    #: (tokens, sparse layers, experts per token).
    shape: tuple[int, int, int]
    #: uint16, little endian, in C order.
    expert_ids: bytes

    @staticmethod
    def join(parts: Sequence[RoutedExperts]) -> RoutedExperts | None:
        """Concatenate `parts`, which cover consecutive tokens. Return None if `parts` is empty."""
        if len(parts) <= 1:
            return parts[0] if parts else None
        _, num_layers, num_experts = parts[0].shape
        num_tokens = sum(part.shape[0] for part in parts)
        return RoutedExperts(
            (num_tokens, num_layers, num_experts), b"".join(part.expert_ids for part in parts)
        )


class BeamOutput(_Wire):
    """One finished beam of a beam search."""

    token_ids: list[int]
    cumulative_logprob: float
    #: cumulative_logprob / number of tokens ** length_penalty. Beams are ordered by this score.
    score: float
    finish_reason: FinishReason
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None


class EngineCoreEventType(enum.IntEnum):
    """Kind of a change of a request's scheduling state."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(_Wire):
    """A change of a request's scheduling state inside the engine."""

    type: EngineCoreEventType
    #: `time.monotonic()` of the engine process, in seconds. Compare it within one process only.
    timestamp: float


class EngineCoreOutput(_Wire):
    request_id: str
    new_token_ids: list[int]
    #: Index of new_token_ids[0] in the generated sequence, including generated_token_ids. Clients
    #: detect gaps and repeats by this index.
    token_offset: int = 0
    finish_reason: FinishReason | None = None
    #: The stop token that ended the request, if any: the last of new_token_ids.
    stop_token_id: int | None = None
    error: str = ""
    error_code: ErrorCode | None = None
    new_logprobs: list[TokenLogprobs] | None = None
    #: Prompt tokens taken from the prefix cache; set on the first output.
    num_cached_tokens: int = 0
    #: Events of the request since its last output.
    events: list[EngineCoreEvent] | None = None
    #: Logprobs from prompt position 1 on, all on the first output with a token.
    prompt_logprobs: PromptLogprobs | None = None
    #: Beam search: all finished beams, best first. The request has no other output.
    beams: list[BeamOutput] | None = None
    num_nans_in_logits: int = 0
    #: Experts of all tokens computed since the last output.
    routed_experts: RoutedExperts | None = None
    #: Pooling model: the vector of the prompt as float32, little endian. The request has no other
    #: output.
    pooler_output: bytes | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class UtilityRequest(_Wire):
    call_id: int
    #: Name of a method in the engine's allow-list.
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
    """Consecutive blocks of one sequence were added to the prefix cache."""

    block_hashes: list[bytes]
    #: Hash of the block before these blocks, or the root hash at the start of the sequence.
    parent_hash: bytes
    block_size: int


class BlocksRemoved(_Wire, tag="removed"):
    """Blocks were evicted from the prefix cache."""

    block_hashes: list[bytes]


class AllBlocksCleared(_Wire, tag="cleared"):
    """The prefix cache was reset."""


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class KVEventBatch(_Wire):
    #: Grows by one per batch. After a gap, the state of this engine's cache is unknown.
    sequence: int
    events: list[KVEvent]
