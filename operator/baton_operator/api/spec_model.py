"""`spec.model` and `status.model`: the source, the cache and the status of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from baton_operator.api.field_types import ApiStruct, ObjectName, Quantity, Tokens

_HUB = r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?"
_STORE = r"(s3|gs)://[a-z0-9][a-z0-9._-]*/+[^/].*"
_IMAGE = r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[a-f0-9]{64})"
IMAGE_URI = rf"image://({_IMAGE})(/[A-Za-z0-9._/-]+)?"
MODEL_URI = rf"^(file:///.+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/.+|{_HUB}|{_STORE}|{IMAGE_URI})$"


def needs_download(uri: str) -> bool:
    """Return whether an init container must download the model at `uri`."""
    return uri.partition("://")[0] in ("hf", "s3", "gs")


class ModelCache(ApiStruct, frozen=True):
    """Where models from a hub or an object store are kept.

    Without hostPath and claim, each pod downloads its own copy.
    """

    #: Folder on every node. The pods of a node share it, so each node downloads the model once. It
    #: must be writable for user or group 65532. It excludes claim.
    host_path: Annotated[str, Meta(pattern=r"^/.+", max_length=1024)] | None = None
    #: PersistentVolumeClaim in the service's namespace. All pods share it, so the model is
    #: downloaded once. Pods on several nodes need access mode ReadWriteMany. It excludes hostPath.
    claim: ObjectName | None = None
    #: Maximum size of the model, for example 200Gi. A larger model is not downloaded. Without
    #: hostPath and claim, it also limits the pod's own volume. Unset: no limit.
    size_limit: Quantity | None = None


class Model(ApiStruct, frozen=True):
    """The model that the service serves."""

    #: Folder with config.json, safetensors and tokenizer.json. file:///DIR: on every node.
    #: pvc://CLAIM/DIR: in a PersistentVolumeClaim of the service's namespace.
    #: hf://ORG/NAME[@REVISION]: on a Hugging Face hub, by default revision main. s3://BUCKET/PREFIX
    #: or gs://BUCKET/PREFIX: in an object store. image://REFERENCE[/DIR]: in an image with a tag or
    #: digest, which needs image volumes (Kubernetes 1.31 or newer).
    uri: Annotated[str, Meta(max_length=2048)]
    cache: ModelCache | None = None
    #: Secret in the service's namespace. Its entries become environment variables of the container
    #: that downloads the model, and of no other container. Examples: HF_TOKEN, HF_ENDPOINT,
    #: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL.
    credentials_secret: ObjectName | None = None
    #: Model name that clients use. Unset: the name of the LLMService.
    served_name: Annotated[str, Meta(min_length=1, max_length=253)] | None = None
    #: Data type of weights and KV cache. auto: the type of the checkpoint, or float32 on a CPU that
    #: has no instructions to multiply in that type. Engines with different types cannot exchange KV
    #: blocks. So set it if the pods run on different machines.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: Type to which weights are rounded: int8, with a scale per output, or int4, with a scale per
    #: 32 inputs of an output. Only engines on CPUs support it. Unset: weights keep their type.
    quantization: Literal["int8", "int4"] | None = None
    #: What the model does. generate: it generates text. pooling: it returns embeddings. auto: the
    #: checkpoint decides. Unset: auto.
    runner: Literal["auto", "generate", "pooling"] | None = None
    #: Maximum number of tokens of a sequence, prompt included. Unset: the model's own maximum.
    max_model_len: Tokens | None = None
    #: How the model writes tool calls. auto: its chat template decides. Unset: auto.
    tool_parser: (
        Literal[
            "auto",
            "deepseek_v3",
            "deepseek_v31",
            "gptoss",
            "hermes",
            "json",
            "llama3_json",
            "mistral",
            "mistral_args",
            "pythonic",
        ]
        | None
    ) = None
    #: How the model writes its reasoning. think: between <think> and </think>. mistral: between
    #: [THINK] and [/THINK]. gptoss: the channel analysis. none: the reasoning is not told apart.
    #: auto: the chat template decides. Unset: auto.
    reasoning_parser: Literal["auto", "none", "gptoss", "mistral", "think"] | None = None


class ModelStatus(ApiStruct, frozen=True):
    """The model that pods have now or had earlier."""

    uri: str  #: spec.model.uri of these pods.
    #: Revision of a downloaded model: the commit on the hub, or a hash of the metadata of the
    #: objects in the store.
    revision: str | None = None
