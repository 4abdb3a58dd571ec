"""What the structs of the LLMService resource have in common: their base, free-form fields and patterns."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

FREE_FORM = {"x-kubernetes-preserve-unknown-fields": True}
QUANTITY = r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?$"
DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class ApiStruct(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
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
