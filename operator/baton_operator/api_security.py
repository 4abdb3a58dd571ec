"""`spec.security` of the LLMService resource."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton_operator.api_types import FREE_FORM, ApiStruct

Peer = Annotated[
    dict[str, Any],
    Meta(
        description="As in a NetworkPolicy: podSelector, namespaceSelector, ipBlock. At least one of them.",
        min_length=1,
        extra_json_schema=FREE_FORM,
    ),
]


class Security(ApiStruct, frozen=True):
    """Who may reach the pods of the service."""

    network_policy: Annotated[
        bool,
        Meta(
            description="true: NetworkPolicies let engines be reached by the service's own gateways, by each other and by the "
            "operator only, and the coordinator by its ranks and the operator. The gateway is not restricted. It takes a "
            "network plugin that enforces them."
        ),
    ] = True
    metrics_from: Annotated[
        list[Peer],
        Meta(
            max_length=16,
            description="Who else may reach the HTTP port of engines and coordinator, to collect metrics; for example "
            "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]. Empty: nobody.",
        ),
    ] = msgspec.field(default_factory=list)
