"""`spec.model`: where the model comes from and how long it stays, and what the status says of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton_operator.api_types import QUANTITY, ApiStruct

_HUB = r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?"
_STORE = r"(s3|gs)://[a-z0-9][a-z0-9._-]*/+[^/].*"
IMAGE_URI = r"image://([a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[a-f0-9]{64}))(/[A-Za-z0-9._/-]+)?"
MODEL_URI = rf"^(file:///.+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/.+|{_HUB}|{_STORE}|{IMAGE_URI})$"
FETCHED_SCHEMES = ("hf", "s3", "gs")
"""Of models that an init container brings."""


def is_fetched(uri: str) -> bool:
    """Whether an init container brings the model."""
    return uri.partition("://")[0] in FETCHED_SCHEMES


OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

Uri = Annotated[
    str,
    Meta(
        pattern=MODEL_URI,
        max_length=2048,
        description="Where config.json, safetensors and tokenizer.json lie: file:///DIR on every node; pvc://CLAIM/DIR in a "
        "PersistentVolumeClaim of the namespace; hf://ORG/NAME[@REVISION] on a Hugging Face hub; s3://BUCKET/PREFIX or "
        "gs://BUCKET/PREFIX in an object store; image://REFERENCE[/DIR] in an image with a tag or digest (Kubernetes 1.31 and "
        "newer, where image volumes are enabled).",
    ),
]


class ModelCache(ApiStruct, frozen=True):
    """Where models of a hub or an object store are kept. Without hostPath or claim: in each pod, for as long as it lives."""

    host_path: (
        Annotated[
            str,
            Meta(
                pattern=r"^/.+",
                max_length=1024,
                description="Folder of every node, writable for user or group 65532, that its pods share: each node fetches once.",
            ),
        ]
        | None
    ) = None
    claim: (
        Annotated[
            str,
            Meta(
                pattern=OBJECT_NAME,
                max_length=253,
                description="PersistentVolumeClaim of the namespace that all pods share, so of access mode ReadWriteMany where "
                "there are several nodes: it is fetched once.",
            ),
        ]
        | None
    ) = None
    size_limit: (
        Annotated[
            str,
            Meta(
                pattern=QUANTITY,
                description="A larger model is not fetched. Without hostPath and claim it also limits the pod's own volume.",
            ),
        ]
        | None
    ) = None


CacheField = ModelCache | None
CredentialsSecret = (
    Annotated[
        str,
        Meta(
            pattern=OBJECT_NAME,
            max_length=253,
            description="Secret of the namespace whose entries are the environment of what fetches the model, and of nothing else: "
            "HF_TOKEN, HF_ENDPOINT, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, ...",
        ),
    ]
    | None
)


class ModelStatus(ApiStruct, frozen=True):
    """The model that pods had last; kept while none runs."""

    uri: Annotated[str, Meta(description="As it was asked for.")]
    revision: (
        Annotated[
            str,
            Meta(
                description="Of one that was fetched, what it was then: a commit of a hub, or a hash over what a store said of "
                "its objects."
            ),
        ]
        | None
    ) = None
