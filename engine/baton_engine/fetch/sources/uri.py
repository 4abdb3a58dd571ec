"""Parses model URIs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton_engine.fetch.fetch_errors import FetchError

_HUB = re.compile(
    r"hf://([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?",
    re.ASCII,
)
_STORE = re.compile(r"(s3|gs)://([a-z0-9][a-z0-9._-]*)/(.+)", re.ASCII)
DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class HubModel:
    """A repository on a Hugging Face hub, at a branch, tag or commit."""

    repo: str
    revision: str

    @property
    def uri(self) -> str:
        return f"hf://{self.repo}@{self.revision}"

    @property
    def name(self) -> str:
        """Name by which clients request the model, if no other name is configured."""
        return self.repo


@dataclass(frozen=True)
class StoredModel:
    """A model in an object store: the objects under a prefix of a bucket."""

    scheme: str
    bucket: str
    #: Without leading and trailing slashes.
    prefix: str

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    @property
    def name(self) -> str:
        """Name by which clients request the model, if no other name is configured."""
        return self.prefix.rpartition("/")[2]


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form ORG/NAME[@REVISION]."""
    return _HUB.fullmatch(f"hf://{text}") is not None


def parse(uri: str) -> HubModel | StoredModel:
    """Parse `hf://ORG/NAME[@REVISION]`, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`.

    Raises:
        FetchError: the URI has none of these forms (ModelUriInvalid).
    """
    if match := _HUB.fullmatch(uri):
        return HubModel(match[1], match[2] or DEFAULT_REVISION)
    if match := _STORE.fullmatch(uri):
        prefix = match[3].strip("/")
        if prefix and ".." not in prefix.split("/"):
            return StoredModel(match[1], match[2], prefix)
    raise FetchError(
        "ModelUriInvalid",
        f"{uri!r} is none of hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX and gs://BUCKET/PREFIX",
    )
