"""The LLMService resource, v1alpha1, as typed structs. `crd.py` turns them into the CRD's schema: docstrings and `Meta`
become descriptions, bounds and defaults there, so what the API server refuses is written here and nowhere else.

Only what the engine can do is accepted; a bound that will be lifted says so in its description.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

FREE_FORM = {"x-kubernetes-preserve-unknown-fields": True}
DEFAULT_IMAGE = "baton:0.1.0"
MAX_NAME_LENGTH = 40
"""Of the resource: leaves room for `-prefill-<ordinal>` and hashes in a DNS label."""

MODEL_URI = r"^(file:///.+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/.+)$"
QUANTITY = r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?$"
DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class _Api(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    pass


def _object(description: str) -> Meta:
    return Meta(description=description, extra_json_schema=FREE_FORM)


Resources = Annotated[dict[str, Any], _object("Container resources: requests and limits, as in a pod.")]
Template = Annotated[
    dict[str, Any],
    _object(
        "Pod template overlay (metadata, spec), merged over what the operator builds; lists of named items merge by name. "
        "The container is called engine in prefill and decode pods, gateway in gateway pods."
    ),
]


class Model(_Api, frozen=True):
    """What is served."""

    uri: Annotated[
        str,
        Meta(
            pattern=MODEL_URI,
            description="file:///DIR on every node, or pvc://CLAIM/DIR in a PersistentVolumeClaim of the namespace: a folder "
            "with config.json, safetensors and tokenizer.json.",
        ),
    ]
    served_name: (
        Annotated[
            str, Meta(min_length=1, max_length=253, description="Name clients use; the resource's own name if unset.")
        ]
        | None
    ) = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Of weights and KV cache. auto: the checkpoint's, but float32 on a CPU that does not multiply in it "
            "natively. Engines of different dtypes hand nothing to each other: set it where their machines differ."
        ),
    ] = "auto"
    quantization: (
        Annotated[
            Literal["int8"],
            Meta(
                description="int8: engines on CPUs multiply by weights rounded to eight bits; those on GPUs refuse. If "
                "unset, weights stay as they are."
            ),
        ]
        | None
    ) = None
    max_model_len: (
        Annotated[
            int,
            Meta(ge=1, le=2**24, description="Prompt plus generated tokens; the model's own maximum if unset."),
        ]
        | None
    ) = None


Tensor = Annotated[
    int,
    Meta(
        ge=1,
        le=64,
        description="Tensor-parallel size: workers of one pod, one device each, over which every layer is spread. Prefill and "
        "decode may differ. The model's KV heads must divide among the workers.",
    ),
]


class PrefillParallelism(_Api, frozen=True):
    """How one prefill rank is spread over devices."""

    tensor: Tensor = 1


class DecodeParallelism(_Api, frozen=True):
    """How decode ranks are spread over devices."""

    tensor: Tensor = 1
    expert: Annotated[
        bool,
        Meta(
            description="true: the ranks are one group over which the experts of a mixture-of-experts model are spread, and "
            "editing replicas is an elastic operation without a lost request. false: every rank is an engine of its own."
        ),
    ] = False
    redundant_experts: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="With expert: copies of experts in each sparse layer of the group beyond one of each, for balance and "
            "for when a rank dies. They cost memory on every rank.",
        ),
    ] = 0


class Prefill(_Api, frozen=True):
    """The group that runs the first leg of a request."""

    replicas: Annotated[
        int, Meta(ge=0, le=256, description="Data-parallel ranks, one pod each. 0: decode pods prefill for themselves.")
    ] = 1
    parallelism: PrefillParallelism = PrefillParallelism()
    resources: Resources | None = None
    template: Template | None = None


class Decode(_Api, frozen=True):
    """The group that generates; the scale subresource points here."""

    replicas: Annotated[int, Meta(ge=0, le=256, description="Data-parallel ranks, one pod each.")] = 1
    parallelism: DecodeParallelism = DecodeParallelism()
    resources: Resources | None = None
    template: Template | None = None


class KVTransfer(_Api, frozen=True):
    """How KV blocks travel from prefill to decode pods."""

    transport: Annotated[
        Literal["ucx", "nixl"],
        Meta(
            description="ucx: over UCX, one-sided where the fabric can. nixl: the NIXL library, which the image must hold."
        ),
    ] = "ucx"
    mode: Annotated[
        Literal["pull", "push"],
        Meta(
            description="pull: decode pods read what prefill published. push: prefill writes it while it computes on."
        ),
    ] = "pull"
    load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description="What a decode pod does about blocks that did not arrive whole: compute them, or fail the request."
        ),
    ] = "recompute"


class Ingress(_Api, frozen=True):
    """Access by host name."""

    host: Annotated[str, Meta(pattern=DNS_NAME, max_length=253, description="Host name clients use.")]
    class_name: (
        Annotated[str, Meta(min_length=1, max_length=253, description="IngressClass; the cluster's default if unset.")]
        | None
    ) = None


class Gateway(_Api, frozen=True):
    """The OpenAI-compatible HTTP server in front."""

    replicas: Annotated[int, Meta(ge=1, le=64, description="Pods of the gateway Deployment.")] = 1
    ingress: Ingress | None = None
    max_concurrent_requests: (
        Annotated[int, Meta(ge=1, le=10**6, description="Per gateway pod; more are answered 429 with Retry-After.")]
        | None
    ) = None
    prefill_threshold_tokens: (
        Annotated[int, Meta(ge=0, le=2**24, description="Shorter prompts are prefilled by the decode pod itself.")]
        | None
    ) = None
    resources: Resources | None = None
    template: Template | None = None


class Engine(_Api, frozen=True):
    """Tuning of every engine of the service. What is unset has the engine's own default."""

    device: (
        Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda where the pod has a device, else cpu.")]
        | None
    ) = None
    block_size: Annotated[Literal[8, 16, 32, 64, 128], Meta(description="Tokens per KV block.")] | None = None
    num_blocks: (
        Annotated[int, Meta(ge=2, le=2**31 - 1, description="KV blocks per engine; unset: what kvCacheMemory holds.")]
        | None
    ) = None
    kv_cache_memory: (
        Annotated[str, Meta(pattern=QUANTITY, description="KV memory of one engine on a CPU, for example 512Mi.")]
        | None
    ) = None
    offload_memory: (
        Annotated[
            str,
            Meta(
                pattern=QUANTITY,
                description="Host memory of one engine for prefix blocks that its cache evicts; they are copied back when wanted.",
            ),
        ]
        | None
    ) = None
    enable_prefix_caching: Annotated[bool, Meta(description="Keep and share the blocks of equal prefixes.")] | None = (
        None
    )
    max_num_batched_tokens: (
        Annotated[int, Meta(ge=1, le=2**20, description="Token budget of one step; longer prompts are chunked.")] | None
    ) = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16, description="Sequences that run at the same time.")] | None = None
    max_queue: (
        Annotated[int, Meta(ge=1, le=10**6, description="Waiting requests per engine; more are refused as overload.")]
        | None
    ) = None
    num_threads: (
        Annotated[
            int, Meta(ge=1, le=1024, description="Compute threads per engine. Engines that share a machine must share.")
        ]
        | None
    ) = None


class Spec(_Api, frozen=True):
    """What the user wants."""

    model: Model
    image: Annotated[
        str, Meta(min_length=1, max_length=1024, description="Container image of all pods of the service.")
    ] = DEFAULT_IMAGE
    prefill: Prefill | None = None
    decode: Decode = Decode()
    kv_transfer: KVTransfer = KVTransfer()
    gateway: Gateway = Gateway()
    engine: Engine = Engine()
    drain_timeout_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=86400,
            description="How long a member that leaves may take to finish what it runs, before it is deleted.",
        ),
    ] = 120


class Condition(_Api, frozen=True):
    """One aspect of the state, in Kubernetes' usual form."""

    type: Annotated[str, Meta(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    message: Annotated[str, Meta(max_length=32768)]
    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    observed_generation: Annotated[int, Meta(ge=0)]


class GroupStatus(_Api, frozen=True):
    """Pods of one group."""

    desired: Annotated[int, Meta(ge=0)]
    ready: Annotated[int, Meta(ge=0)]


class RankStatus(_Api, frozen=True):
    """One rank of the present generation."""

    name: Annotated[str, Meta(description="Of the pod.")]
    rank: Annotated[int, Meta(ge=0)]
    phase: Annotated[str, Meta(description="loading, standby, serving or broken.")]


class OperationSeconds(_Api, frozen=True):
    """How long each phase took; what is under way is not counted yet."""

    waiting: Annotated[float, Meta(ge=0)] | None = None
    preparing: Annotated[float, Meta(ge=0)] | None = None
    committing: Annotated[float, Meta(ge=0)] | None = None


class OperationStatus(_Api, frozen=True):
    """The operation on the topology that runs, or ran last."""

    id: Annotated[str, Meta(description="As it was asked for by; - if the ranks did so by themselves.")]
    kind: Annotated[str, Meta(description="form, scale, recover or rebalance.")]
    phase: Annotated[str, Meta(description="waiting, preparing, committing, done, failed or superseded.")]
    generation: Annotated[int, Meta(ge=0, description="That it leads to; 0: not drawn yet.")]
    seconds: OperationSeconds
    reason: str | None = None


class TopologyStatus(_Api, frozen=True):
    """The expert-parallel group as its coordinator reports it; what was reported last while it does not answer."""

    coordinator: Annotated[str, Meta(description="Address that the ranks report to.")]
    generation: Annotated[int, Meta(ge=0, description="Number of the present topology; 0: none was formed yet.")]
    ranks: list[RankStatus]
    operation: OperationStatus | None = None


class DecodeStatus(_Api, frozen=True):
    """Pods of the decode group, as the scale subresource reads them."""

    desired: Annotated[int, Meta(ge=0)]
    ready: Annotated[int, Meta(ge=0, description="With expert: ranks that serve in the present generation.")]
    replicas: Annotated[int, Meta(ge=0, description="Pods that exist, those that drain included.")]
    selector: Annotated[str, Meta(description="Finds the decode pods; for autoscalers.")]
    topology: TopologyStatus | None = None


class Status(_Api, frozen=True):
    """What the operator saw last."""

    observed_generation: Annotated[int, Meta(ge=0)] | None = None
    endpoint: Annotated[str, Meta(description="URL of the gateway, from nodes and pods.")] | None = None
    ingress_endpoint: Annotated[str, Meta(description="URL through the Ingress, if one was asked for.")] | None = None
    conditions: (
        Annotated[
            list[Condition],
            Meta(extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
        ]
        | None
    ) = None
    prefill: GroupStatus | None = None
    decode: DecodeStatus | None = None
    gateway: GroupStatus | None = None


class LLMService(_Api, frozen=True):
    """A large language model served on this cluster: prefill and decode pods and a gateway in front."""

    spec: Spec
    status: Status | None = None


def decode_spec(spec: Any) -> Spec:
    """The typed form of `.spec` as the API server returns it.

    Raises:
        msgspec.ValidationError: naming the field, for an object stored under another version of the CRD.
    """
    return msgspec.convert(spec, Spec)


_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def quantity_bytes(quantity: str) -> int:
    """`512Mi` as bytes. `quantity` matches QUANTITY."""
    digits = quantity.rstrip("KMGTki")
    return int(digits) * _UNITS[quantity[len(digits) :]]
