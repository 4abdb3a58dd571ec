"""`spec.model`: where the model comes from and where it is kept, and its status."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from baton_operator.api.field_types import ApiStruct, ObjectName, Quantity, Tokens

_HUB = r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?"
_STORE = r"(s3|gs)://[a-z0-9][a-z0-9._-]*/+[^/].*"
_IMAGE = r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[a-f0-9]{64})"
IMAGE_URI = rf"image://({_IMAGE})(/[A-Za-z0-9._/-]+)?"
MODEL_URI = rf"^(file:///.+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/.+|{_HUB}|{_STORE}|{IMAGE_URI})$"


def is_fetched(uri: str) -> bool:
    """Return whether an init container brings the model."""
    return uri.partition("://")[0] in ("hf", "s3", "gs")


class ModelCache(ApiStruct, frozen=True):
    """Where models of a hub or object store are kept.

    Without hostPath or claim: in each pod, until it is deleted.
    """

    #: Folder of every node, writable for user or group 65532, that its pods share: each node
    #: fetches once.
    host_path: Annotated[str, Meta(pattern=r"^/.+", max_length=1024)] | None = None
    #: PersistentVolumeClaim of the namespace that all pods share: the model is fetched once. On
    #: several nodes it needs access mode ReadWriteMany.
    claim: ObjectName | None = None
    #: A larger model is not fetched. Without hostPath and claim it also limits the pod's own
    #: volume.
    size_limit: Quantity | None = None


class Model(ApiStruct, frozen=True):
    """The model that the service serves."""

    #: Where config.json, safetensors and tokenizer.json lie: file:///DIR on every node;
    #: pvc://CLAIM/DIR in a PersistentVolumeClaim of the namespace; hf://ORG/NAME[@REVISION] on a
    #: Hugging Face hub; s3://BUCKET/PREFIX or gs://BUCKET/PREFIX in an object store;
    #: image://REFERENCE[/DIR] in an image with a tag or digest (Kubernetes 1.31 and newer, where
    #: image volumes are enabled).
    uri: Annotated[str, Meta(pattern=MODEL_URI, max_length=2048)]
    cache: ModelCache | None = None
    #: Secret of the namespace. Its entries are environment variables of the container that fetches
    #: the model, and of no other: HF_TOKEN, HF_ENDPOINT, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    #: AWS_ENDPOINT_URL, ...
    credentials_secret: ObjectName | None = None
    #: Name clients use; the resource's own name if unset.
    served_name: Annotated[str, Meta(min_length=1, max_length=253)] | None = None
    #: Type of weights and KV cache. auto: the checkpoint's, but float32 on a CPU that does not
    #: multiply in it natively. Engines of different dtypes exchange no KV blocks: set it where
    #: their machines differ.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: int8: engines on CPUs multiply by weights rounded to eight bits; engines on GPUs refuse it.
    #: Unset: weights stay as they are.
    quantization: Literal["int8"] | None = None
    #: Prompt plus generated tokens; the model's own maximum if unset.
    max_model_len: Tokens | None = None


class ModelStatus(ApiStruct, frozen=True):
    """The model that pods had last; kept while none runs."""

    uri: str  #: As spec.model.uri named it.
    #: Revision of a fetched model: the commit on the hub, or a hash over the metadata of its
    #: objects in the store.
    revision: str | None = None
