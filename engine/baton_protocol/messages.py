"""Messages between an engine and its clients (msgspec over ZMQ).

The engine binds a ROUTER, a client connects one DEALER per engine instance. After ZMQ's own routing frame every message
is three frames, in both directions:

    [type: 1 byte] [instance id: ASCII, empty only in HELLO and REFUSED] [payload: msgpack of the struct named below]

    client                          engine
    HELLO      Hello            ->
                                <-  INIT       Init            at once, also while the model loads; again with the hash before READY
                                <-  READY      Ready           when requests are accepted
    ADD        EngineCoreRequest ->
                                <-  OUTPUTS    EngineCoreOutputs
    ABORT      list[str] (request ids)
    PREFILL_RESULT PrefillResult    to the decode side of a disaggregated request
    UTILITY    UtilityRequest   ->
                                <-  OUTPUTS    EngineCoreOutputs(utility_output=...)
    PING       Ping             ->
                                <-  PONG       Pong            answered by the I/O thread: proves the process, not the loop
                                <-  REFUSED    Refused         wrong version, wrong instance id, malformed message
                                <-  DEAD       Dead            the engine loop failed; nothing more will come
                                <-  KV_EVENTS  KVEventBatch    to subscribers: what the prefix cache gained and lost

A message whose instance id is not the receiver's is refused: nothing meant for a dead process reaches its successor.
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
    EXECUTOR_FAILED = b"\x04"
    """Internal to the engine process: the executor's failure, put on the input queue."""
    WAKEUP = b"\x05"
    """Internal to the engine process: look at the world again (a KV load finished, shutdown)."""
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

    STOP = 0
    """A stop token was sampled (EOS or one of stop_token_ids)."""
    LENGTH = 1
    """max_tokens or max_model_len was reached."""
    ABORT = 2
    """The client asked for it."""
    ERROR = 3
    """The engine could not go on; `EngineCoreOutput.error` says why."""
    REPETITION = 4
    """The output repeats itself, as `SamplingParams.repetition_detection` defines it."""

    def __str__(self) -> str:
        return self.name.lower()


class ErrorCode(enum.IntEnum):
    """What kind of failure `EngineCoreOutput.error` describes, so that a client knows whether another pod may help."""

    INVALID = 0
    """The request itself is wrong: no pod will take it."""
    DRAINING = 1
    """This pod takes no new requests; send it elsewhere."""
    OVERLOADED = 2
    """Never fits now (queue full); retry later or elsewhere."""
    INTERNAL = 3
    """The step failed; another pod may succeed."""
    KV_LOAD = 4
    """KV blocks could not be fetched and the policy says fail."""
    LENGTH = 5
    """It can never fit this engine: longer than max_model_len, or than the KV memory. The finish_reason is LENGTH."""


class _Wire(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Options shared by all wire structs: arrays instead of maps, untracked by the GC; new fields go last, with a default."""


class Hello(_Wire):
    protocol_version: int
    client_id: str
    kv_events: bool = False
    """Send me KV_EVENTS. The engine publishes them if config.cache.enable_kv_events is set."""


class Init(_Wire):
    protocol_version: int
    instance_id: str
    """Drawn at process start. A restarted pod is a new instance."""
    config_hash: str
    """Of what must agree between pods that continue each other's requests: see `config.compatibility_hash`. Empty while loading."""
    generation: int = 0
    """Topology generation (elastic groups)."""


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
    kv_cache_usage: float = 0.0
    """Fraction of blocks in use, 0 to 1."""


class Refused(_Wire):
    reason: str
    request_id: str = ""


class Dead(_Wire):
    reason: str


class KVSide(enum.IntEnum):
    PRODUCE = 0
    """Prefill here, keep the blocks for the peer."""
    CONSUME = 1
    """Fetch the prompt's blocks from the peer, then decode."""


class KVTransferParams(_Wire):
    """How one request's KV blocks travel. Both sides are told at the same time, each naming the other."""

    side: KVSide
    transfer_id: str
    """The same on both sides, unique per attempt."""
    peer_instance_id: str
    """Instance id of the other engine; anyone else is refused."""
    remote_host: str = ""
    """CONSUME only: the producer's address."""
    remote_port: int = 0
    """CONSUME only: the port of the producer's KV side channel."""


class EngineCoreRequest(_Wire):
    """One sequence to continue. Everything a pod needs to take it over from any other pod."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    generated_token_ids: list[int] = []
    """Tokens already generated elsewhere. They count as output: penalties, min_tokens and noise positions replay from them."""
    sample_index: int = 0
    """Which of the n samples of one client request this is; part of the noise key."""
    arrival_time: float = 0.0
    """Wall clock of the gateway, seconds; orders requests, never compared with a local clock."""
    priority: int = 0
    """Lower runs first, then arrival."""
    cache_salt: str = ""
    """Requests with different salts share no prefix-cache block."""
    kv_transfer: KVTransferParams | None = None
    data_parallel_rank: int | None = None
    current_wave: int = 0
    trace_headers: dict[str, str] | None = None
    group_id: str = ""
    """Samples of one prompt name the same group: the engine computes the prompt once, they share its blocks (copy-on-write) and
    are swapped together. All members have equal prompts, no generated tokens and no kv_transfer; empty: alone."""
    lora_name: str = ""
    """Keys the prefix cache: KV of different adapters is different KV."""


class PrefillResult(_Wire):
    """Tells the decode side how the prefill leg of a request ended. Sent by the gateway, once per CONSUME request."""

    request_id: str
    token_ids: list[int] = []
    """Sampled by the prefill side, already sent to the client. Empty: the decode side samples from position 0 itself."""
    error: str = ""
    """Non-empty: the prefill side failed; what has not arrived is to be computed here."""


class TokenLogprobs(_Wire):
    token_id: int
    logprob: float
    rank: int = 0
    """1 for the most likely token."""
    top: list[tuple[int, float]] = []
    """The `logprobs` most likely (token id, logprob), best first."""


PromptLogprobs = list[TokenLogprobs]
"""Of consecutive prompt tokens. A prompt's first token has none: nothing predicts it."""


class RoutedExperts(_Wire):
    """Which experts each token took, of a mixture-of-experts model."""

    shape: tuple[int, int, int]
    """(tokens, sparse layers, experts per token)."""
    expert_ids: bytes
    """uint16, little endian, in C order."""


class BeamOutput(_Wire):
    """One finished beam."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    """cumulative_logprob / number of tokens ** length_penalty: what beams are ordered by."""
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
    timestamp: float
    """`time.monotonic()` of the engine process, in seconds: only differences within one process mean anything."""


class EngineCoreOutput(_Wire):
    request_id: str
    new_token_ids: list[int]
    token_offset: int = 0
    """Index in the generated sequence (generated_token_ids included) of the first of new_token_ids: a gap or a repeat is seen."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, if one did. It is the last of new_token_ids."""
    error: str = ""
    error_code: ErrorCode | None = None
    new_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache; set on the first output."""
    num_remote_tokens: int = 0
    """Prompt tokens whose KV came from a peer; set on the first output."""
    events: list[EngineCoreEvent] | None = None
    """What happened since the last output."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of prompt positions 1 on, all at once, on the first output with a token."""
    beams: list[BeamOutput] | None = None
    """Beam search: all finished beams, best first, on the one and last output."""
    num_nans_in_logits: int = 0
    routed_experts: RoutedExperts | None = None
    """Of all tokens computed since the last output."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class UtilityRequest(_Wire):
    call_id: int
    method: str
    """One of the engine's allow-list."""
    args: list[Any] = []
    """msgpack values, converted to the method's annotated types."""


class UtilityOutput(_Wire):
    call_id: int
    failure_message: str | None = None
    result: Any = None
    """A msgpack value: what the method returned."""


class EngineCoreOutputs(_Wire):
    outputs: list[EngineCoreOutput] = []
    utility_output: UtilityOutput | None = None
    engine_index: int = 0
    wave_complete: int | None = None
    start_wave: int | None = None


class BlocksStored(_Wire, tag="stored"):
    """Consecutive blocks of one sequence became findable in the prefix cache."""

    block_hashes: list[bytes]
    parent_hash: bytes
    """Of the block before the first; the root hash if there is none."""
    block_size: int


class BlocksRemoved(_Wire, tag="removed"):
    """Blocks were evicted."""

    block_hashes: list[bytes]


class AllBlocksCleared(_Wire, tag="cleared"):
    """The prefix cache was reset."""


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class KVEventBatch(_Wire):
    sequence: int
    """Counts up by one per batch. A gap means that batches were missed: what is known of this engine's cache is void."""
    events: list[KVEvent]
