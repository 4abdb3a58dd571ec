"""`spec.gateway`: how clients reach the service, and what one of them may take."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from baton_operator.api_types import DNS_NAME, ApiStruct, Resources, Template

SecretName = Annotated[
    str, Meta(pattern=DNS_NAME, max_length=253, description="Name of a Secret in the service's namespace.")
]
Hostname = Annotated[
    str, Meta(pattern=r"^(\*\.)?" + DNS_NAME[1:], max_length=253, description="A name, or *.DOMAIN for those below it.")
]


class TLS(ApiStruct, frozen=True):
    """HTTPS with the certificate of a Secret of type kubernetes.io/tls (tls.crt, tls.key)."""

    secret_name: SecretName


class Ingress(ApiStruct, frozen=True):
    """Access by host name through an Ingress."""

    host: Annotated[str, Meta(pattern=DNS_NAME, max_length=253, description="Host name clients use.")]
    class_name: (
        Annotated[str, Meta(min_length=1, max_length=253, description="IngressClass; the cluster's default if unset.")]
        | None
    ) = None
    annotations: (
        Annotated[
            dict[str, str],
            Meta(
                description="Of the Ingress: what its controller or cert-manager wants to be told, such as that the gateway speaks "
                "HTTPS itself where gateway.tls is set."
            ),
        ]
        | None
    ) = None
    tls: Annotated[
        TLS | None,
        Meta(description="The Ingress ends TLS for the host with the certificate of this Secret. Unset: HTTP."),
    ] = None


class ParentReference(ApiStruct, frozen=True):
    """A Gateway of the Gateway API, or one listener of it."""

    name: Annotated[str, Meta(pattern=DNS_NAME, max_length=253, description="Name of the Gateway.")]
    namespace: (
        Annotated[str, Meta(pattern=DNS_NAME, max_length=63, description="Of the Gateway; the service's own if unset.")]
        | None
    ) = None
    section_name: (
        Annotated[str, Meta(pattern=DNS_NAME, max_length=253, description="One listener; all that match if unset.")]
        | None
    ) = None
    port: Annotated[int, Meta(ge=1, le=65535, description="Only listeners on this port.")] | None = None


class HTTPRoute(ApiStruct, frozen=True):
    """Access through a Gateway of the Gateway API (gateway.networking.k8s.io/v1), where the cluster has it."""

    parent_refs: Annotated[
        list[ParentReference], Meta(min_length=1, max_length=32, description="The Gateways that carry the route.")
    ]
    hostnames: (
        Annotated[list[Hostname], Meta(max_length=16, description="Host names clients use; the listener's if unset.")]
        | None
    ) = None


class APIKeys(ApiStruct, frozen=True):
    """Only clients with a key (`Authorization: Bearer KEY`) are served. Others get 401, but for /health, /ready and /metrics."""

    secret_name: Annotated[
        str,
        Meta(
            pattern=DNS_NAME,
            max_length=253,
            description="Name of a Secret in the service's namespace. The value of every entry is a key, its name what logs and "
            "metrics call the client. Changes are taken up while the gateway runs; without an entry nobody is served.",
        ),
    ]


class Limits(ApiStruct, frozen=True):
    """What one client, or one request, may take."""

    max_concurrent_per_key: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=10**6,
                description="Sequences of one API key that a gateway pod serves at once; more are answered 429 with Retry-After. "
                "Needs apiKeys.",
            ),
        ]
        | None
    ) = None
    max_prompt_tokens: (
        Annotated[int, Meta(ge=1, le=2**24, description="Longer prompts are answered 400; the model's limit if unset.")]
        | None
    ) = None
    max_completion_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=2**24,
                description="Who asks for a longer answer gets 400, who names no length as much at most; the model's limit if "
                "unset.",
            ),
        ]
        | None
    ) = None


class Routing(ApiStruct, frozen=True):
    """Which engine a request goes to."""

    policy: Annotated[
        Literal["leastLoaded"],
        Meta(
            description="leastLoaded: the engine with the fewest requests, of several the one with the most free KV memory. "
            "There is no other one yet."
        ),
    ] = "leastLoaded"


class Gateway(ApiStruct, frozen=True):
    """The OpenAI-compatible HTTP server in front."""

    replicas: Annotated[int, Meta(ge=1, le=64, description="Pods of the gateway Deployment.")] = 1
    ingress: Ingress | None = None
    http_route: HTTPRoute | None = None
    tls: Annotated[
        TLS | None,
        Meta(
            description="The gateway itself speaks HTTPS, on port 443 of its Service, with the certificate of this Secret; a "
            "renewed one is taken up while it runs. Unset: HTTP on port 80. While this is switched, either port leads to the "
            "pods that speak its protocol, until the last old one is gone."
        ),
    ] = None
    api_keys: APIKeys | None = None
    limits: Limits = Limits()
    routing: Routing = Routing()
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
