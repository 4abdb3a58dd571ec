"""The LLMService resource, v1alpha1, as typed structs. `crd.py` turns them into the CRD's schema: docstrings and `Meta`
become descriptions, bounds and defaults there, so what the API server refuses is written here and nowhere else.

Only what the engine can do is accepted; a bound that will be lifted says so in its description.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton_operator.api_autoscaling import AutoscalingStatus as AutoscalingStatus
from baton_operator.api_autoscaling import DecodeAutoscaling, PrefillAutoscaling
from baton_operator.api_gateway import Gateway as Gateway
from baton_operator.api_gateway import Ingress as Ingress
from baton_operator.api_model import CacheField, CredentialsSecret, Uri
from baton_operator.api_security import Security as Security
from baton_operator.api_status import Condition as Condition
from baton_operator.api_status import DecodeStatus as DecodeStatus
from baton_operator.api_status import GroupStatus as GroupStatus
from baton_operator.api_status import OperationSeconds as OperationSeconds
from baton_operator.api_status import OperationStatus as OperationStatus
from baton_operator.api_status import PrefillStatus as PrefillStatus
from baton_operator.api_status import RankStatus as RankStatus
from baton_operator.api_status import Status as Status
from baton_operator.api_status import TopologyStatus as TopologyStatus
from baton_operator.api_types import QUANTITY, ApiStruct
from baton_operator.api_types import Resources as Resources
from baton_operator.api_types import Template as Template
from baton_operator.api_update import UpdateStrategy as UpdateStrategy

DEFAULT_IMAGE = "baton:0.1.0"
MAX_NAME_LENGTH = 40
"""Of the resource: leaves room for `-prefill-<ordinal>` and hashes in a DNS label."""


class Model(ApiStruct, frozen=True):
    """What is served."""

    uri: Uri
    cache: CacheField = None
    credentials_secret: CredentialsSecret = None
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


class PrefillParallelism(ApiStruct, frozen=True):
    """How one prefill rank is spread over devices."""

    tensor: Tensor = 1


class DecodeParallelism(ApiStruct, frozen=True):
    """How decode ranks are spread over devices."""

    tensor: Tensor = 1
    pipeline: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Pipeline stages: the layers are spread over so many times as many workers of the pod. Not together with "
            "prefill, whose KV blocks only workers with all layers can take, nor with expert.",
        ),
    ] = 1
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


class Prefill(ApiStruct, frozen=True):
    """The group that runs the first leg of a request."""

    replicas: Annotated[
        int, Meta(ge=0, le=256, description="Data-parallel ranks, one pod each. 0: decode pods prefill for themselves.")
    ] = 1
    autoscaling: PrefillAutoscaling | None = None
    parallelism: PrefillParallelism = PrefillParallelism()
    resources: Resources | None = None
    template: Template | None = None


class Decode(ApiStruct, frozen=True):
    """The group that generates; the scale subresource points here."""

    replicas: Annotated[int, Meta(ge=0, le=256, description="Data-parallel ranks, one pod each.")] = 1
    autoscaling: DecodeAutoscaling | None = None
    parallelism: DecodeParallelism = DecodeParallelism()
    resources: Resources | None = None
    template: Template | None = None


class KVTransfer(ApiStruct, frozen=True):
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


class Engine(ApiStruct, frozen=True):
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


class Spec(ApiStruct, frozen=True):
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
    security: Security = Security()
    drain_timeout_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=86400,
            description="How long a member that leaves may take to finish what it runs, before it is deleted.",
        ),
    ] = 120
    update_strategy: UpdateStrategy = UpdateStrategy()
    progress_deadline_seconds: Annotated[
        int,
        Meta(
            ge=1,
            le=86400,
            description="A pod of a new revision that is not ready for so long counts as stalled: condition Updating is False with "
            "reason RolloutStalled, and the pods that are left of the earlier revision serve on.",
        ),
    ] = 600
    paused: Annotated[
        bool,
        Meta(
            description="true: edits wait, but for replicas, and pods that die are replaced by what was asked for before the pause."
        ),
    ] = False


class LLMService(ApiStruct, frozen=True):
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
