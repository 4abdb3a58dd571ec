"""`spec.engine`, `spec.prefill.engine` and `spec.decode.engine`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_operator.api.field_types import ApiStruct, Milliseconds, ObjectName, Percent, Quantity


class Storage(ApiStruct, frozen=True):
    """A folder that outlives the pods. It needs either hostPath or claim."""

    #: Folder on every node, which the pods of a node share. It must be writable for user or group
    #: 65532. It excludes claim.
    host_path: Annotated[str, Meta(pattern=r"^/.+", max_length=1024)] | None = None
    #: PersistentVolumeClaim in the service's namespace, which all pods share. Pods on several nodes
    #: need access mode ReadWriteMany. It excludes hostPath.
    claim: ObjectName | None = None


Argument = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=1024,
        description="A flag, or a value of the flag that precedes it.",
    ),
]


class Engine(ApiStruct, frozen=True):
    """Tuning of every engine of the service. An unset field has the engine's default."""

    #: auto: cuda if the pod has a GPU, else cpu. Unset: auto.
    device: Literal["auto", "cpu", "cuda"] | None = None
    block_size: Literal[8, 16, 32, 64, 128] | None = None  #: Tokens per KV block. Unset: 16.
    #: Number of KV blocks per engine. Unset: as many as kvCacheMemory holds.
    num_blocks: Annotated[int, Meta(ge=2, le=2**31 - 1)] | None = None
    #: Memory for the KV blocks of one engine, for example 512Mi. numBlocks overrides it. Layers
    #: with a sliding window, as in Mistral, also keep the KV of all tokens. Unset: as much as fits
    #: on a GPU, and 256Mi on a CPU.
    kv_cache_memory: Quantity | None = None
    #: Percentage of a GPU's memory for weights, activations and KV blocks together. numBlocks and
    #: kvCacheMemory override it. Unset: 90.
    gpu_memory_utilization_percent: Percent | None = None
    #: Host memory of one engine for blocks that its prefix cache evicts, for example 8Gi. They are
    #: copied back when a prompt needs them. The pod needs it beside the KV cache. On a GPU it is
    #: pinned at the start of the engine. Unset: evicted blocks are computed again.
    offload_memory: Quantity | None = None
    #: Host memory of one engine for blocks of preempted requests, see preemptionMode. Requests
    #: whose blocks do not fit are computed again. The pod needs it beside the KV cache: on a GPU
    #: from the start, on a CPU from the first preemption that swaps. With preemptionMode recompute,
    #: no memory is used. Unset: 5 % of the available host memory, at most the size of the KV cache.
    swap_memory: Quantity | None = None
    #: true: requests share the blocks of equal prefixes, and later requests use them. Unset: true.
    enable_prefix_caching: bool | None = None
    #: Maximum number of tokens of one step. A longer prompt is computed in chunks. Unset: 512.
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    #: Maximum number of tokens of one prompt in a step while shorter prompts wait. 0: no limit.
    #: Unset: 0.
    long_prefill_token_threshold: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    #: Wanted time from one token of a sequence to the next. Beside running sequences, a step
    #: computes only as many prompt tokens as are expected to fit this time. A lower value makes
    #: tokens come more evenly, and first tokens later. Unset: only maxNumBatchedTokens limits a
    #: step.
    target_itl_milliseconds: Milliseconds | None = None
    #: Maximum number of sequences that one engine runs at the same time. Unset: 64.
    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    #: Maximum number of waiting requests of one engine. Further requests get 429 with Retry-After,
    #: unless another engine accepts them. Unset: 4096.
    max_queue: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    #: Order of waiting requests. priority: requests with lower priority values first, then earlier
    #: arrivals. fcfs: earlier arrivals first. Unset: priority.
    scheduling_policy: Literal["priority", "fcfs"] | None = None
    #: What happens to the KV blocks of a request that is preempted. recompute: they are computed
    #: again. swap: they are copied to swapMemory and back. auto: swap for groups with several
    #: running sequences, and recompute for other requests. Unset: auto.
    preemption_mode: Literal["auto", "recompute", "swap"] | None = None
    #: true: an engine schedules a step while the previous step runs. Unset: false.
    async_scheduling: bool | None = None
    #: Compute threads of each worker of an engine. Set it if engines on one machine share its
    #: cores. Unset: one per core that the container may use.
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    #: Seconds without an answer after which a worker counts as dead. It must exceed the duration of
    #: the longest step. Unset: 300.
    step_timeout_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None
    #: true: engines use neither torch.compile nor CUDA graphs. It overrides compilationMode and
    #: cudagraphMode. Unset: false.
    enforce_eager: bool | None = None
    #: How torch compiles the model. inductor: to kernels. eager: the model is traced, but not
    #: compiled. none: it is not traced. auto: inductor on a GPU, and none on a CPU. Unset: auto.
    compilation_mode: Literal["auto", "none", "eager", "inductor"] | None = None
    #: Parts of a step that run as CUDA graphs. piecewise: the parts between attentions. full: whole
    #: steps. full_decode_only: whole decode steps. full_and_piecewise: whole decode steps, and the
    #: parts of other steps. none: no part. auto: full_and_piecewise on a GPU if the model is
    #: compiled, full_decode_only if it is not, and none on a CPU. Unset: auto.
    cudagraph_mode: (
        Literal["auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]
        | None
    ) = None
    #: Where engines keep compiled code for the next start. Engines and services may share it.
    #: Engines execute its content, so only trusted users may write to it. Unset: the pod's own
    #: volume.
    compile_cache: Storage | None = None
    #: Where engines write the input of failed steps, and profiles that POST /start_profile starts.
    #: File names contain the name of the pod. Unset: failed steps are written to the pod's own
    #: volume, and profiles are refused.
    diagnostics: Storage | None = None
    log_iterations: bool | None = None  #: true: engines log a line for each step. Unset: false.
    #: true: engines count NaN logits of sampled tokens, for responses and for the metric
    #: baton:num_nans_in_logits_total. Unset: false.
    count_nans_in_logits: bool | None = None
    #: Flags of baton-engine for options without a field, such as --watermark=0.02. Options that the
    #: operator sets or that name code are refused. Unset: none.
    extra_args: Annotated[list[Argument], Meta(max_length=64)] | None = None


def merged(service: Engine, role: Engine | None) -> Engine:
    """Return the engine options of one role: those of `service`, overridden by those of `role`.

    The extra arguments of `role` are appended to the extra arguments of `service`.

    Args:
        service: `spec.engine`.
        role: `spec.prefill.engine` or `spec.decode.engine`; None if it is not set.
    """
    if role is None:
        return service
    given = {
        name: value for name, value in msgspec.structs.asdict(role).items() if value is not None
    }
    if service.extra_args and role.extra_args:
        given["extra_args"] = [*service.extra_args, *role.extra_args]
    return msgspec.structs.replace(service, **given)
