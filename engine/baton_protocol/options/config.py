"""Configuration of one engine and of one gateway, as structs.

The operator writes these structs as JSON into a ConfigMap. `baton-engine --config FILE` and
`baton-gateway --config FILE` read this JSON, and command-line flags override single fields. All
defaults are declared in this file.
"""

# Without `from __future__ import annotations`: lambdas in annotations need this module's names.
import enum
import hashlib
import math
import os
import re
from pathlib import Path
from typing import Annotated

import msgspec

from baton_protocol.options.option import Bound, Option, at_least, choice

ENGINE_PORT = 5557
KV_PORT = 5558
ENGINE_HTTP_PORT = 8000
GATEWAY_PORT = 8080
GATEWAY_METRICS_PORT = 8081
#: Types to which weights can be rounded.
QUANTIZATIONS = ("int8", "int4")

#: An origin in the form of a browser's Origin header, or `*`.
ORIGIN = r"^(\*|[a-z][-a-z0-9+.]*://([-a-z0-9._]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)$"

_PORT = Bound("be in [0, 65535]", lambda value: 0 <= value < 65536)
_QUALIFIED_NAME = Bound("be a qualified name, package.module.Class", lambda value: "." in value)
# NaN fails all comparisons.
_POSITIVE = Bound("be positive", lambda value: value > 0)
_NOT_NEGATIVE = Bound("not be negative", lambda value: value >= 0)
_SECONDS = Bound("be a positive number of seconds", lambda value: 0 < value < math.inf)
_PRIORITY = Bound("be in [-2147483648, 0]", lambda value: -(2**31) <= value <= 0)
_ORIGINS = Bound(
    "be origins in lower case, such as https://chat.example.com, or *",
    lambda value: all(re.fullmatch(ORIGIN, origin) for origin in value),
)


class KVRole(enum.StrEnum):
    NONE = "none"
    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"


class _Config(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class ModelConfig(_Config, frozen=True):
    #: The folder has config.json, safetensors and tokenizer.json. The gateway reads only
    #: tokenizer.json. The path is a path inside the container.
    path: Annotated[str, Option("folder of the checkpoint", flag="--model")]
    served_name: Annotated[
        str, Option("name clients use; default: the folder's name", flag="--served-model-name")
    ] = ""
    #: auto is the checkpoint's dtype, or float32 on a CPU without native products in that dtype.
    dtype: Annotated[str, choice("auto", "float32", "bfloat16", "float16")] = "auto"
    #: auto pools if the checkpoint is one of `sentence-transformers` (modules.json), or if its
    #: architecture has no output layer.
    runner: Annotated[
        str,
        choice(
            "auto",
            "generate",
            "pooling",
            help="generate tokens, or pool prompts to embeddings: auto, generate or pooling",
        ),
    ] = "auto"
    #: The model scores pairs of texts: the score is the probability of the second token against
    #: the first, after the prompt. Needed for Qwen3-Reranker as published: no,yes.
    classifier_from_token: Annotated[
        tuple[str, ...],
        Option(
            "two tokens whose logits are a reranker's score: no,yes",
            Bound("be two tokens", lambda value: len(value) in (0, 2)),
        ),
    ] = ()
    #: None does not quantize weights.
    quantization: Annotated[
        str | None,
        Option(
            "round weights, on a CPU only: int8, a scale per output; int4, a scale per 32 inputs "
            "of an output",
            Bound(
                f"be {' or '.join(QUANTIZATIONS)}, or not given",
                lambda value: value in QUANTIZATIONS,
            ),
        ),
    ] = None
    #: None is the model's own maximum.
    max_model_len: Annotated[
        int | None, Option("limit of prompt plus generated tokens of a request", at_least(1))
    ] = None


class CacheConfig(_Config, frozen=True):
    block_size: Annotated[int, Option("tokens per KV block", at_least(1))] = 16
    #: None is as many as memory_bytes or gpu_memory_utilization allows.
    num_blocks: Annotated[int | None, Option("number of KV blocks", at_least(1))] = None
    #: On a GPU, a value replaces gpu_memory_utilization. None: 256 MiB on a CPU, and on a GPU as
    #: much as gpu_memory_utilization allows.
    memory_bytes: Annotated[
        int | None,
        Option(
            "bytes of KV memory, if --num-blocks is not given",
            at_least(1),
            "--kv-cache-memory-bytes",
        ),
    ] = None
    #: The limit is for weights, activations and KV together. It does not apply if memory_bytes sets
    #: the size of the cache.
    gpu_memory_utilization: Annotated[
        float,
        Option(
            "fraction of GPU memory to use", Bound("be in (0, 1]", lambda value: 0 < value <= 1)
        ),
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Option("reuse KV blocks of earlier requests")] = True
    #: A GPU's host memory is pinned at the start. On a CPU, memory becomes resident at its first
    #: use. None: 5 % of the available host memory, at most the size of the cache. With 0, the
    #: blocks are computed again.
    swap_memory_bytes: Annotated[
        int | None,
        Option("bytes of host memory for the KV blocks of preempted requests", at_least(0)),
    ] = None
    #: A GPU's host memory is pinned at the start. Blocks in this memory are copied back instead of
    #: computed. 0 disables the offload tier.
    offload_memory_bytes: Annotated[
        int, Option("bytes of host memory for evicted prefix blocks", at_least(0))
    ] = 0
    #: The free blocks are kept for the growth of running requests.
    watermark: Annotated[
        float,
        Option(
            "fraction of blocks that admission leaves free",
            Bound("be in [0, 1)", lambda value: 0 <= value < 1),
        ),
    ] = 0.01
    enable_kv_events: Annotated[bool, Option("publish changes of the prefix cache")] = False


class SchedulerConfig(_Config, frozen=True):
    #: A longer prompt is computed in chunks.
    max_num_batched_tokens: Annotated[int, Option("token budget of one step", at_least(1))] = 512
    max_num_seqs: Annotated[int, Option("limit of running sequences", at_least(1))] = 64
    #: Further requests are refused as OVERLOADED.
    max_queue: Annotated[int, Option("limit of waiting requests", at_least(1))] = 4096
    #: priority runs lower values first, then earlier arrivals. fcfs orders by arrival only.
    policy: Annotated[str, choice("priority", "fcfs", flag="--scheduling-policy")] = "priority"
    #: If false, a prompt runs in one step, so it must fit the budget.
    enable_chunked_prefill: Annotated[bool, Option("run long prompts in several steps")] = True
    #: 0 sets no limit.
    long_prefill_token_threshold: Annotated[
        int,
        Option("most tokens of one prompt in a step while shorter prompts wait", at_least(0)),
    ] = 0
    #: Beside decodes, a step computes only as many prompt tokens as are expected to fit this time.
    #: 0 sets no target.
    target_itl_s: Annotated[
        float,
        Option(
            "wanted seconds between two tokens of a sequence; bounds prompt chunks", _NOT_NEGATIVE
        ),
    ] = 0.0
    #: auto swaps beam searches and groups of samples with several running sequences, and recomputes
    #: other requests.
    preemption_mode: Annotated[str, choice("auto", "recompute", "swap")] = "auto"
    async_scheduling: Annotated[bool, Option("schedule a step while the previous step runs")] = (
        False
    )
    #: Class of the scheduler.
    scheduler_class: Annotated[str, Option("qualified name", _QUALIFIED_NAME)] = (
        "baton_engine.scheduling.scheduler.Scheduler"
    )


class ParallelConfig(_Config, frozen=True):
    tensor_parallel_size: Annotated[int, Option("ranks that share each layer", at_least(1))] = 1
    pipeline_parallel_size: Annotated[
        int, Option("stages the layers are split into", at_least(1))
    ] = 1
    #: auto is uniproc for one worker, and multiproc for more. A class is a qualified name.
    executor_class: Annotated[
        str,
        Option("auto, uniproc, multiproc, external_launcher, ray, or a class", flag="--executor"),
    ] = "auto"
    #: Class of the workers.
    worker_class: Annotated[str, Option("qualified name", _QUALIFIED_NAME)] = (
        "baton_engine.worker.worker.Worker"
    )
    #: Ranks of a group share the experts of a model and step together. They need a coordinator.
    enable_expert_parallel: Annotated[bool, Option("run as a rank of an expert-parallel group")] = (
        False
    )
    coordinator: Annotated[str, Option("host:port of the group's coordinator")] = ""
    #: Without $POD_NAME, the host's name is used.
    rank_name: Annotated[str, Option("name of this rank in topologies; $POD_NAME if not given")] = (
        ""
    )
    #: The copies balance the load, and replace experts of a rank that dies.
    num_redundant_experts: Annotated[
        int, Option("additional copies of experts in each layer of the group", at_least(0))
    ] = 0
    #: The timeout must exceed the time by which ranks drift apart in a step.
    collective_timeout_s: Annotated[
        float, Option("seconds that a worker waits for another worker", _SECONDS)
    ] = 120.0
    #: The timeout must exceed the duration of the longest step.
    step_timeout_s: Annotated[
        float, Option("seconds after which a silent worker counts as dead", _SECONDS)
    ] = 300.0

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class CompilationConfig(_Config, frozen=True):
    """How the model runs: compiled by torch, replayed as CUDA graphs, both, or neither."""

    #: This field overrides the other fields.
    enforce_eager: Annotated[bool, Option("neither torch.compile nor CUDA graphs")] = False
    #: eager traces the model and cuts it at attention, but does not compile it. auto is inductor on
    #: a GPU, and none on a CPU.
    mode: Annotated[str, choice("auto", "none", "eager", "inductor", flag="--compilation-mode")] = (
        "auto"
    )
    #: piecewise records the parts between attentions. full_and_piecewise records whole decode
    #: steps, and the parts of other steps. auto is full_and_piecewise on a GPU if the model is
    #: compiled, full_decode_only if it is not, and none on a CPU.
    cudagraph_mode: Annotated[
        str,
        choice("auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"),
    ] = "auto"
    #: A step is padded to the next size. An empty list means no graphs. None selects sizes up to
    #: 512 tokens: multiples of 8 up to 256, where most decode steps are, and multiples of 16 above.
    capture_sizes: Annotated[
        tuple[int, ...] | None, Option("numbers of tokens to capture graphs for: 1,2,4,8")
    ] = None
    #: Other numbers of tokens run code that was compiled for any number.
    compile_sizes: Annotated[
        tuple[int, ...], Option("numbers of tokens with compiled code of their own")
    ] = ()
    #: The folder must be writable by this user, and must not be writable by all users. The default
    #: is $XDG_CACHE_HOME/baton/compile, or ~/.cache/baton/compile if the variable is not set.
    cache_dir: Annotated[
        str,
        Option("folder for compiled code, reused by the next start", flag="--compile-cache-dir"),
    ] = ""


class ObservabilityConfig(_Config, frozen=True):
    #: The line has the contents and the duration of the step.
    log_iterations: Annotated[bool, Option("one log line per step")] = False
    #: Responses and the metric num_nans_in_logits_total have the counts.
    count_nans_in_logits: Annotated[bool, Option("count NaN logits of sampled tokens")] = False
    #: Without a folder, requests for a profile are refused.
    profiler_dir: Annotated[str, Option("folder for torch profiles")] = ""
    #: The default is the system's temporary folder.
    crash_dump_dir: Annotated[str, Option("folder for the input of a failed step")] = ""


class KVTransferConfig(_Config, frozen=True):
    #: A producer computes prompts and provides their KV blocks. A consumer loads the blocks and
    #: generates tokens.
    role: Annotated[KVRole, Option(", ".join(KVRole), flag="--kv-role")] = KVRole.NONE
    #: auto is, for each peer, the first of shm, tcp and ucx that both sides have. With RDMA, ucx
    #: comes before tcp.
    transport: Annotated[
        str, choice("ucx", "tcp", "shm", "auto", "nixl", flag="--kv-transport")
    ] = "ucx"
    #: Used with the transports ucx and auto.
    rdma: Annotated[
        bool,
        Option("refuse to start without an RDMA device and a UCX with verbs", flag="--kv-rdma"),
    ] = False
    port: Annotated[int, Option("port of the KV side channel", _PORT, "--kv-port")] = KV_PORT
    #: What happens if KV blocks do not arrive intact: they are computed, or the request fails.
    load_failure_policy: Annotated[
        str, choice("recompute", "fail", flag="--kv-load-failure-policy")
    ] = "recompute"
    load_timeout_s: Annotated[
        float,
        Option("seconds that a consumer waits without progress", _SECONDS, "--kv-load-timeout-s"),
    ] = 30.0
    #: The time starts again with each message of the consumer.
    lease_s: Annotated[
        float, Option("seconds that a producer waits for its consumer", _SECONDS, "--kv-lease-s")
    ] = 30.0
    #: How blocks reach this engine.
    mode: Annotated[
        str,
        choice(
            "pull",
            "push",
            help="pull (this engine reads blocks) or push (the producer writes them)",
            flag="--kv-mode",
        ),
    ] = "pull"
    #: Further transfers wait in a queue, and requests take turns.
    max_inflight_bytes: Annotated[
        int, Option("bytes in flight with one peer", at_least(1), "--kv-max-inflight-bytes")
    ] = 64 * 2**20
    #: Used for the KV cache of a GPU, with every transport.
    staging_bytes: Annotated[
        int,
        Option(
            "bytes of pinned host memory for KV transfers of a GPU",
            at_least(1),
            "--kv-staging-bytes",
        ),
    ] = 256 * 2**20


class EngineConfig(_Config, frozen=True):
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    parallel: ParallelConfig = ParallelConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    compilation: CompilationConfig = CompilationConfig()
    #: auto is cuda if there is a GPU, and cpu otherwise.
    device: Annotated[str, choice("auto", "cpu", "cuda")] = "auto"
    #: None is one thread per core that the process may use, within its container's CPU limit.
    num_threads: Annotated[int | None, Option("compute threads of each worker", at_least(1))] = None
    #: For workers that share a host and compute on its CPU. A worker's cores are on one NUMA node
    #: if possible.
    bind_threads: Annotated[bool, Option("bind each worker process to cores of its own")] = True
    engine_port: Annotated[int, Option("port of the engine's ROUTER", _PORT)] = ENGINE_PORT
    http_port: Annotated[int, Option("port of health, metrics and drain", _PORT)] = ENGINE_HTTP_PORT
    #: All processes of a service share the key (`service_key`). Without it, connections are not
    #: authenticated.
    service_key_file: Annotated[str, Option("file with the key of the service")] = ""
    drain_timeout_s: Annotated[
        float,
        Option(
            "seconds for running requests to end after SIGTERM",
            Bound("be 0 or more seconds", lambda value: 0 <= value < math.inf),
        ),
    ] = 30.0


class DiscoveryConfig(_Config, frozen=True):
    """How the gateway discovers engines. Exactly one of `file` and `service` must be set."""

    #: The file contains `EngineEndpoints`. The gateway reads a changed file again.
    file: Annotated[str, Option("JSON file of engine endpoints", flag="--discovery-file")] = ""
    namespace: Annotated[
        str, Option("namespace of the LLMService", flag="--discovery-namespace")
    ] = ""
    #: The service's pods have the label serving.baton.dev/service=<service>.
    service: Annotated[
        str, Option("name of the LLMService whose pods to watch", flag="--discovery-service")
    ] = ""
    #: In seconds. The re-list repairs the effect of a lost watch event.
    resync_s: Annotated[
        float, Option("full re-list of pods at this interval", flag="--discovery-resync-s")
    ] = 30.0


class AccessConfig(_Config, frozen=True):
    """The clients that the gateway admits, and the limits of their requests."""

    #: The name of a file is the name of a client. The gateway reads a changed folder again. Empty:
    #: no API keys.
    api_keys_dir: Annotated[
        str, Option("folder with one file per client that contains its API key")
    ] = ""
    #: Changed files are read again. Empty: HTTP.
    tls_dir: Annotated[str, Option("folder with tls.crt and tls.key: serve HTTPS")] = ""
    #: Responses name the allowed origins in CORS headers. Empty: responses have no CORS headers.
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "origins whose pages may call the gateway: https://chat.example.com, or *", _ORIGINS
        ),
    ] = ()
    #: Further requests get 429 with Retry-After. None: no limit per client.
    max_concurrent_per_client: Annotated[
        int | None, Option("sequences of one API key at once", _POSITIVE)
    ] = None
    #: key: only the requests of one client share cached blocks. service: all clients share cached
    #: blocks, so each client can find out which prompts the others have sent. Without API keys, all
    #: clients share cached blocks.
    cache_sharing: Annotated[
        str, choice("key", "service", help="clients that share cached blocks of prompts")
    ] = "key"
    #: Requests that name one of these salts in `cache_salt` share cached blocks with all clients.
    shared_cache_salts: Annotated[
        tuple[str, ...], Option("values of cache_salt that all clients share")
    ] = ()
    #: Lower values run first, and 0 is the priority of requests that set none. So at 0, no request
    #: overtakes the others.
    min_priority: Annotated[
        int, Option("requests with a lower priority are refused", _PRIORITY)
    ] = 0
    #: None: the model's limit.
    max_prompt_tokens: Annotated[int | None, Option("longer prompts are refused", _POSITIVE)] = None
    #: Also the limit of requests that set no limit. None: the model's limit.
    max_completion_tokens: Annotated[
        int | None, Option("requests for more tokens are refused, answers end there", _POSITIVE)
    ] = None


#: The formats of `baton_text.reply_parsing`.
TOOL_PARSERS = (
    "deepseek_v3",
    "deepseek_v31",
    "gptoss",
    "hermes",
    "json",
    "llama3_json",
    "mistral",
    "mistral_args",
    "pythonic",
)
REASONING_PARSERS = ("gptoss", "mistral", "think")


class GatewayConfig(_Config, frozen=True):
    model: ModelConfig
    discovery: DiscoveryConfig
    access: AccessConfig = AccessConfig()
    port: Annotated[int, Option("HTTP port on $POD_IP; 0: any free port", _PORT)] = GATEWAY_PORT
    #: The port of the clients has no /metrics, because metrics name the clients. This port serves
    #: HTTP without TLS and without API keys.
    metrics_port: Annotated[
        int, Option("port of /metrics, /health and /ready on $POD_IP; 0: any free port", _PORT)
    ] = GATEWAY_METRICS_PORT
    metrics_host: Annotated[
        str, Option("address to bind metrics_port to; empty: $POD_IP, as for port")
    ] = ""
    #: Beyond this number, the connection that has waited longest for a request is closed. The value
    #: is lowered to half of the limit of file descriptors, and to two for each MiB of the
    #: container's memory limit.
    max_connections: Annotated[
        int, Option("connections of clients that are open at once", _POSITIVE)
    ] = 4096
    #: The 429 has Retry-After.
    max_concurrent_requests: Annotated[
        int, Option("sequences served at once; more get 429", _POSITIVE)
    ] = 1024
    #: none uses OpenAI's defaults.
    generation_config: Annotated[
        str,
        choice(
            "auto",
            "none",
            help="auto: default sampling parameters come from the checkpoint's "
            "generation_config.json",
        ),
    ] = "auto"
    tool_parser: Annotated[
        str,
        choice(
            "auto",
            *TOOL_PARSERS,
            help="how the model writes tool calls; auto: its chat template decides",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        choice(
            "auto",
            "none",
            *REASONING_PARSERS,
            help="how the model writes its reasoning; auto: its chat template decides",
        ),
    ] = "auto"
    #: The decode engine computes such prompts itself.
    prefill_threshold_tokens: Annotated[int, Option("shorter prompts skip the prefill engines")] = 0
    #: Seconds between PINGs. An engine silent for two intervals gets no new requests.
    heartbeat_interval_s: Annotated[
        float, Option("interval of heartbeats to engines", _POSITIVE)
    ] = 0.5
    #: Requests of a dead engine continue on another engine.
    heartbeat_timeout_s: Annotated[
        float, Option("an engine that sends nothing for this long counts as dead")
    ] = 3.0
    #: An engine whose longest recent step took more than half of this time gets twice the duration
    #: of that step instead. Requests that a pause freezes also continue on another engine.
    stall_timeout_s: Annotated[
        float,
        Option(
            "requests that make no progress for this long continue on another engine", _POSITIVE
        ),
    ] = 30.0
    #: Waits of preempted requests count. The time to the first token of each decode engine does
    #: not, because the engine may have to load or recompute the KV cache. 0 sets no limit.
    inter_token_timeout_s: Annotated[
        float,
        Option(
            "a response that has begun and gets no token for this long continues on another engine",
            _NOT_NEGATIVE,
        ),
    ] = 0.0
    #: The 503 has Retry-After.
    queue_wait_s: Annotated[
        float,
        Option("new requests wait this long for a decode engine, then get 503", _NOT_NEGATIVE),
    ] = 10.0
    resume_wait_s: Annotated[
        float, Option("requests whose engine was lost wait this long for another", _NOT_NEGATIVE)
    ] = 30.0
    #: After this time, requests get 503 with Retry-After. 0: the service is never scaled to zero,
    #: see queue_wait_s.
    hold_s: Annotated[
        float,
        Option(
            "requests wait this long for a service that is scaled to zero; 0: do not wait",
            _NOT_NEGATIVE,
        ),
    ] = 0.0
    #: Requests that wait for a new gateway's first engine also count. The 503 has Retry-After.
    max_held_requests: Annotated[
        int,
        Option(
            "requests that wait at once for a service that is scaled to zero; more get 503",
            _NOT_NEGATIVE,
        ),
    ] = 256
    #: 0 sets no limit.
    request_timeout_s: Annotated[
        float,
        Option(
            "a request that takes longer fails; waits for a service that is scaled to zero do not "
            "count",
            _NOT_NEGATIVE,
        ),
    ] = 0.0
    #: A slow client must not keep a request in memory.
    client_timeout_s: Annotated[
        float,
        Option(
            "longest time in which a client sends a body, or reads a response or an event",
            _SECONDS,
        ),
    ] = 600.0
    #: Engines with a key refuse a gateway without the key. Empty: no key.
    service_key_file: Annotated[str, Option("file with the engines' key")] = ""
    drain_timeout_s: Annotated[
        float, Option("running requests may take this long to end after SIGTERM", _NOT_NEGATIVE)
    ] = 30.0
    #: Load balancers notice a shutdown late, and still send requests after SIGTERM.
    drain_quiet_s: Annotated[
        float,
        Option("serve after SIGTERM until no request has arrived for this long", _NOT_NEGATIVE),
    ] = 5.0


class EngineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Name, role and address of one engine pod."""

    name: str
    #: prefill or decode.
    role: str
    host: str
    engine_port: int = ENGINE_PORT
    kv_port: int = KV_PORT
    draining: bool = False


class EngineEndpoints(msgspec.Struct, kw_only=True):
    """Content of the gateway's discovery file."""

    engines: list[EngineEndpoint]


def pod_ip() -> str:
    """Return the address that this process binds: $POD_IP, or loopback if $POD_IP is not set."""
    return os.environ.get("POD_IP") or "127.0.0.1"


def container_path(path: str) -> Path:
    """Translate a path inside the pod to a path that this process can open.

    In a container, the path stays the same. In the local cluster, a pod is a plain process whose
    volumes are under $POCKETKUBE_POD_ROOT.
    """
    root = os.environ.get("POCKETKUBE_POD_ROOT")
    if root:
        mapped = Path(root) / path.lstrip("/")
        if mapped.exists():
            return mapped
    return Path(path)


def compatibility_hash(
    model_files: dict[str, bytes], dtype: str, layout: str, quantization: str | None = None
) -> str:
    """Return a hash that is equal on engines with the same model, dtype and KV layout.

    Engines with equal hashes may exchange KV blocks and continue each other's requests. Numbers
    such as the block size are not part of the hash. Engines compare these numbers one by one, so
    that an error names both values.

    Args:
        model_files: small files that identify the checkpoint (config.json, weight index), by name.
        dtype: dtype of weights and KV cache.
        layout: name of the KV layout.
        quantization: quantization of weights, which changes the computed KV. None: not quantized.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"baton-compat")
    for name in sorted(model_files):
        digest.update(name.encode() + b"\x00" + hashlib.blake2b(model_files[name]).digest())
    digest.update(f"{dtype}/{layout}".encode())
    if quantization is not None:
        digest.update(f"/{quantization}".encode())
    return digest.hexdigest()
