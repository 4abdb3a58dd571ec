"""`spec.gateway` and `spec.security`: access of clients and of peers, and limits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton_operator.api.field_types import (
    DNS_NAME,
    ApiStruct,
    DNSName,
    Hostname,
    Peer,
    Resources,
    Template,
    Tokens,
)

Requests = Annotated[int, Meta(ge=1, le=10**6)]


class TLS(ApiStruct, frozen=True):
    """HTTPS with the certificate of a Secret of type kubernetes.io/tls (tls.crt, tls.key)."""

    secret_name: DNSName  #: Name of a Secret in the service's namespace.


class Ingress(ApiStruct, frozen=True):
    """Access by host name through an Ingress."""

    host: DNSName  #: Host name that clients use.
    #: IngressClass; the cluster's default if unset.
    class_name: Annotated[str, Meta(min_length=1, max_length=253)] | None = None
    #: Annotations of the Ingress, for its controller or cert-manager. With gateway.tls, for example
    #: the annotation that the backend serves HTTPS.
    annotations: dict[str, str] | None = None
    #: The Ingress ends TLS for the host with the certificate of this Secret. Unset: HTTP.
    tls: TLS | None = None


class ParentReference(ApiStruct, frozen=True):
    """A Gateway of the Gateway API, or one listener of it."""

    name: DNSName  #: Name of the Gateway.
    #: Namespace of the Gateway; the service's own if unset.
    namespace: Annotated[str, Meta(pattern=DNS_NAME, max_length=63)] | None = None
    section_name: DNSName | None = None  #: One listener; all that match if unset.
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None  #: Only listeners on this port.


class HTTPRoute(ApiStruct, frozen=True):
    """Access through a Gateway of the Gateway API (gateway.networking.k8s.io/v1)."""

    #: The Gateways that carry the route.
    parent_refs: Annotated[list[ParentReference], Meta(min_length=1, max_length=32)]
    #: Host names that clients use; those of the listener if unset.
    hostnames: Annotated[list[Hostname], Meta(max_length=16)] | None = None


class APIKeys(ApiStruct, frozen=True):
    """API keys of clients, sent as `Authorization: Bearer KEY`."""

    #: Name of a Secret in the service's namespace. The value of every entry is a key, its name is
    #: the client's name in logs and metrics. Changes apply while the gateway runs. Requests without
    #: a key get 401, except on /health, /ready and /metrics. An empty Secret refuses every request.
    secret_name: DNSName


class Limits(ApiStruct, frozen=True):
    """Limits of one client or one request."""

    #: Sequences of one API key that a gateway pod serves at once; more are answered 429 with
    #: Retry-After. Needs apiKeys.
    max_concurrent_per_key: Requests | None = None
    #: Longer prompts are answered 400; the model's limit if unset.
    max_prompt_tokens: Tokens | None = None
    #: Requests for a longer answer are answered 400. Requests without a length get at most this
    #: many tokens. The model's limit if unset.
    max_completion_tokens: Tokens | None = None


class Routing(ApiStruct, frozen=True):
    """Which engine a request goes to."""

    #: leastLoaded: the engine with the fewest requests, of several the one with the most free KV
    #: memory. It is the only policy so far.
    policy: Literal["leastLoaded"] = "leastLoaded"


class Gateway(ApiStruct, frozen=True):
    """The OpenAI-compatible HTTP server in front."""

    replicas: Annotated[int, Meta(ge=1, le=64)] = 1  #: Pods of the gateway Deployment.
    ingress: Ingress | None = None
    http_route: HTTPRoute | None = None
    #: The gateway itself serves HTTPS, on port 443 of its Service, with the certificate of this
    #: Secret. It reloads a renewed certificate while it runs. Unset: HTTP on port 80. While this is
    #: switched, each port leads to the pods that serve its protocol, until the last old pod is
    #: gone.
    tls: TLS | None = None
    api_keys: APIKeys | None = None
    limits: Limits = Limits()
    routing: Routing = Routing()
    #: Per gateway pod; more are answered 429 with Retry-After.
    max_concurrent_requests: Requests | None = None
    #: Decode pods prefill prompts shorter than this themselves.
    prefill_threshold_tokens: Annotated[int, Meta(ge=0, le=2**24)] | None = None
    resources: Resources | None = None
    template: Template | None = None


class Security(ApiStruct, frozen=True):
    """Which peers may reach the pods of the service."""

    #: true: NetworkPolicies admit only the service's own gateways, its engines and the operator to
    #: engines, and only its ranks and the operator to the coordinator. The gateway is not
    #: restricted. Needs a network plugin that enforces NetworkPolicies.
    network_policy: bool = True
    #: Further peers that may reach the HTTP port of engines and coordinator, to collect metrics.
    #: For example [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}].
    #: Empty: none.
    metrics_from: Annotated[list[Peer], Meta(max_length=16)] = msgspec.field(default_factory=list)
