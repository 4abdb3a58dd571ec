"""Configuration of one engine and of one gateway, as structs.

The operator writes them as JSON into a ConfigMap; `baton-engine --config FILE` and `baton-gateway --config FILE` read them,
and every field has a command-line flag that overrides it. What is not set has the default written here, and nowhere else.
"""

from __future__ import annotations

import enum
import hashlib
import os
from pathlib import Path

import msgspec

ENGINE_PORT = 5557
KV_PORT = 5558
ENGINE_HTTP_PORT = 8000
GATEWAY_PORT = 8080


class KVRole(enum.StrEnum):
    NONE = "none"
    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"


class _Config(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class ModelConfig(_Config, frozen=True):
    path: str
    """Folder with config.json, safetensors and tokenizer.json, as the container sees it."""
    served_name: str = ""
    """Name clients use; empty: the folder's name."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16. auto: the checkpoint's, but float32 on a CPU that does not multiply in it natively."""
    quantization: str | None = None
    """int8: a CPU multiplies by weights rounded to eight bits, a scale per output. None: by those of the checkpoint."""
    max_model_len: int | None = None
    """Prompt plus generated tokens. None: the model's own maximum."""


class CacheConfig(_Config, frozen=True):
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """None: what memory_bytes holds."""
    memory_bytes: int = 256 * 2**20
    """KV memory of one engine on a CPU."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that weights, activations and KV may take together."""
    enable_prefix_caching: bool = True
    swap_memory_bytes: int = 64 * 2**20
    """Host memory for blocks of preempted groups; allocated when first needed. 0: they are recomputed."""
    offload_memory_bytes: int = 0
    """Host memory for prefix blocks that the cache evicts: found there again, they are copied back instead of computed. 0: none."""
    watermark: float = 0.01
    """Fraction of the blocks that admission leaves free for those already running."""
    enable_kv_events: bool = False
    """Tell clients that subscribe what the prefix cache gains and loses."""


class SchedulerConfig(_Config, frozen=True):
    max_num_batched_tokens: int = 512
    """Token budget of one step; longer prompts are chunked."""
    max_num_seqs: int = 64
    max_queue: int = 4096
    """Waiting requests; more are refused as OVERLOADED."""
    policy: str = "priority"
    """priority (lower value first, then arrival) or fcfs (arrival alone)."""
    enable_chunked_prefill: bool = True
    """False: a prompt runs in one step, so it must fit the budget."""
    long_prefill_token_threshold: int = 0
    """A step runs at most so many tokens of one prompt, if shorter ones wait for the budget. 0: no limit."""
    preemption_mode: str = "auto"
    """recompute, swap, or auto: swap for groups with several running sequences, recompute for the others."""
    async_scheduling: bool = False
    """Schedule the next step while the model still runs this one."""
    scheduler_class: str = "baton_engine.scheduling.scheduler.Scheduler"
    """Qualified name."""


class ParallelConfig(_Config, frozen=True):
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    executor_class: str = "auto"
    """auto (uniproc, or multiproc for more than one worker), uniproc, multiproc, external_launcher, ray, or a qualified name."""
    worker_class: str = "baton_engine.worker.worker.Worker"
    """Qualified name."""
    enable_expert_parallel: bool = False
    """The engine is a rank of a group over which a model's experts are spread; ranks step together. Needs a coordinator."""
    coordinator: str = ""
    """host:port of the group's coordinator."""
    rank_name: str = ""
    """What topologies call this rank; empty: $POD_NAME, else the host's name."""
    num_redundant_experts: int = 0
    """Copies of experts in each sparse layer of the group beyond one of each: for balance, and for when a rank dies."""
    collective_timeout_s: float = 120.0
    """A worker gives up an exchange with another that is silent for so long: more than ranks drift apart in a step."""
    step_timeout_s: float = 300.0
    """Workers that neither answer a step nor die for so long count as dead: more than the longest step takes."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class CompilationConfig(_Config, frozen=True):
    """How the model runs: compiled by torch, replayed as CUDA graphs, both, or neither."""

    enforce_eager: bool = False
    """Neither, whatever the other fields say."""
    mode: str = "auto"
    """none, inductor, or eager: traced and cut at attention, but not compiled. auto: inductor on a GPU, none on a CPU."""
    cudagraph_mode: str = "auto"
    """none, piecewise (between attentions), full, full_decode_only or full_and_piecewise (full for decode steps). auto: the last
    on a GPU, full_decode_only if the model is not compiled there."""
    capture_sizes: tuple[int, ...] | None = None
    """Numbers of tokens graphs are captured for; steps are padded to the next. None: up to 512, dense where decode steps are."""
    compile_sizes: tuple[int, ...] = ()
    """Numbers of tokens the model is compiled for once more, beside the code for any number."""
    cache_dir: str = ""
    """Where compiled code is kept for the next start, if this user can write there and not everybody. Empty:
    $XDG_CACHE_HOME/baton/compile, or below ~/.cache."""


class ObservabilityConfig(_Config, frozen=True):
    log_iterations: bool = False
    """One log line per step: what ran, how long it took."""
    count_nans_in_logits: bool = False
    profiler_dir: str = ""
    """Where start_profile writes torch traces; empty: profiling is refused."""
    crash_dump_dir: str = ""
    """Where the input of a failing step is written; empty: the system's temporary folder."""


class KVTransferConfig(_Config, frozen=True):
    role: KVRole = KVRole.NONE
    transport: str = "ucx"
    """ucx, tcp, shm, auto or nixl."""
    rdma: bool = False
    """Refuse to start without an RDMA device and a UCX with verbs. With transport ucx or auto."""
    port: int = KV_PORT
    load_failure_policy: str = "recompute"
    """recompute or fail."""
    load_timeout_s: float = 30.0
    """A consumer stops waiting for blocks after this long without progress."""
    lease_s: float = 30.0
    """A producer keeps unfetched blocks this long after the last sign of the consumer."""
    mode: str = "pull"
    """How this engine's loads get their blocks. pull: it reads what was published. push: the producer writes them."""
    max_inflight_bytes: int = 64 * 2**20
    """Of the transfers with one peer at a time; what is wanted beyond it queues, each request in its turn."""
    staging_bytes: int = 256 * 2**20
    """Host memory through which the KV of a GPU travels where the transport cannot reach it directly."""


class EngineConfig(_Config, frozen=True):
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    parallel: ParallelConfig = ParallelConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    compilation: CompilationConfig = CompilationConfig()
    device: str = "auto"
    """auto, cpu or cuda."""
    num_threads: int | None = None
    """Compute threads of each worker. None: one per core that it may use, a CPU limit of its container considered."""
    bind_threads: bool = True
    """Worker processes that share a host and compute on its CPU keep to their own cores, if possible of one NUMA node."""
    engine_port: int = ENGINE_PORT
    http_port: int = ENGINE_HTTP_PORT
    service_key_file: str = ""
    """File with the key that all processes of a service share (`service_key`). Empty: every door is open."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, running requests may take this long to end."""


class DiscoveryConfig(_Config, frozen=True):
    """Where the gateway finds its engines: exactly one of file and service."""

    file: str = ""
    """JSON: {"engines": [{"name", "role", "host", "engine_port", "kv_port"}, ...]}, read again when it changes."""
    namespace: str = ""
    service: str = ""
    """Pods labelled serving.baton.dev/service=<service> in the namespace, watched."""
    resync_s: float = 30.0
    """Full re-list: a lost watch event heals after this long at most."""


class AccessConfig(_Config, frozen=True):
    """Who may ask the gateway, and for how much."""

    api_keys_dir: str = ""
    """Folder with one file per client, called as the client is: its content is the client's API key. Read again when it changes.
    Empty: everybody may ask."""
    tls_dir: str = ""
    """Folder with tls.crt and tls.key, read again when they change: HTTPS instead of HTTP. Empty: HTTP."""
    max_concurrent_per_client: int | None = None
    """Sequences of one API key served at once, by each gateway. Beyond it: 429 with Retry-After. None: no limit of its own."""
    max_prompt_tokens: int | None = None
    """Of one prompt; longer ones are refused. None: what the model takes."""
    max_completion_tokens: int | None = None
    """Of one answer: who asks for more is refused, who asks for none gets at most so many. None: what the model takes."""


class GatewayConfig(_Config, frozen=True):
    model: ModelConfig
    discovery: DiscoveryConfig
    access: AccessConfig = AccessConfig()
    port: int = GATEWAY_PORT
    max_concurrent_requests: int = 1024
    """Beyond it: 429 with Retry-After."""
    prefill_threshold_tokens: int = 0
    """Prompts shorter than this are prefilled by the decode pod itself."""
    heartbeat_interval_s: float = 0.5
    """Engines are asked for a sign of life so often. One that is silent for two intervals gets no new requests."""
    heartbeat_timeout_s: float = 3.0
    """An engine that is silent for so long counts as dead: its requests go on elsewhere."""
    queue_wait_s: float = 10.0
    """New requests wait so long for a decode engine if all are away for a moment; then 503 with Retry-After."""
    resume_wait_s: float = 30.0
    """Requests whose engine was lost wait so long for one that can go on with them: a pod may be restarting."""
    hold_s: float = 0.0
    """Requests that come while no decode engine is there are held so long, for the service may be scaled to zero and one is being
    started; then 503 with Retry-After. 0: it is not scaled to zero, see queue_wait_s."""
    max_held_requests: int = 256
    """Beyond it: 503 with Retry-After."""
    request_timeout_s: float = 600.0
    service_key_file: str = ""
    """The engines' key; without it engines that have one refuse this gateway. Empty: none."""
    drain_timeout_s: float = 30.0
    """After SIGTERM: what still runs then is ended."""
    drain_quiet_s: float = 5.0
    """After SIGTERM requests are still served until nobody has sent one for so long: only then does everyone in front know."""


class EngineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine pod as discovery sees it."""

    name: str
    role: str
    """prefill or decode."""
    host: str
    engine_port: int = ENGINE_PORT
    kv_port: int = KV_PORT
    draining: bool = False


class EngineEndpoints(msgspec.Struct, kw_only=True):
    """Content of the discovery file."""

    engines: list[EngineEndpoint]


def pod_ip() -> str:
    """The only address this process may bind: $POD_IP, else loopback."""
    return os.environ.get("POD_IP") or "127.0.0.1"


def container_path(path: str) -> Path:
    """The host's path of `path` as the pod sees it.

    In a container they are the same. A pod that runs as a plain process has its volumes under $POCKETKUBE_POD_ROOT.
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
    """Equal on pods that may exchange KV blocks and continue each other's requests. Numbers that must agree for the first, such
    as the block size, are compared one by one where pods meet: who is refused is told both values.

    Args:
        model_files: small files that identify the checkpoint (config.json, weight index), by name.
        dtype: of weights and KV cache.
        layout: name of the KV layout.
        quantization: of weights; KV that rounded ones computed is not what exact ones would have.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"baton-compat")
    for name in sorted(model_files):
        digest.update(name.encode() + b"\x00" + hashlib.blake2b(model_files[name]).digest())
    digest.update(f"{dtype}/{layout}".encode())
    if quantization is not None:
        digest.update(f"/{quantization}".encode())
    return digest.hexdigest()
