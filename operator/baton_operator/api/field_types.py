"""Types that several structs of the LLMService resource use."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_FREE_FORM = {"x-kubernetes-preserve-unknown-fields": True}


class ApiStruct(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Base class of the structs of the LLMService resource.

    In the CRD, the docstring of a struct and the `#:` comments of its fields are the descriptions.
    """


Count = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=1, le=2**24)]
Percent = Annotated[int, Meta(ge=1, le=100)]
Milliseconds = Annotated[int, Meta(ge=1, le=3_600_000)]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Quantity = Annotated[str, Meta(pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?$")]
ObjectName = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
DNSName = Annotated[str, Meta(pattern=DNS_NAME, max_length=253)]
Hostname = Annotated[
    str,
    Meta(
        pattern=r"^(\*\.)?" + DNS_NAME[1:],
        max_length=253,
        description="A host name, or *.DOMAIN for all names below the domain.",
    ),
]
#: A peer of a NetworkPolicy.
Peer = Annotated[
    dict[str, Any],
    Meta(
        min_length=1,
        description="A peer as in a NetworkPolicy, with at least one of podSelector, "
        "namespaceSelector and ipBlock.",
        extra_json_schema=_FREE_FORM,
    ),
]
Resources = Annotated[
    dict[str, Any],
    Meta(
        description="Container resources: requests and limits, as in a pod.",
        extra_json_schema=_FREE_FORM,
    ),
]
Template = Annotated[
    dict[str, Any],
    Meta(
        description="Pod template overlay (metadata, spec), merged over the pod that the operator "
        "builds. Lists of named items merge by name. The container is called engine in prefill and "
        "decode pods, and gateway in gateway pods.",
        extra_json_schema=_FREE_FORM,
    ),
]

_UNITS = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


def quantity_bytes(quantity: str) -> int:
    """Return the number of bytes of a valid Quantity such as `512Mi`."""
    digits = quantity.rstrip("KMGTki")
    return int(digits) * _UNITS[quantity[len(digits) :]]
