"""`spec.gateway` and `spec.security`: access for clients and peers, and request limits."""

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
from baton_protocol.options.config import ORIGIN

Requests = Annotated[int, Meta(ge=1, le=10**6)]
Origin = Annotated[
    str,
    Meta(
        pattern=ORIGIN,
        max_length=300,
        description="An origin in lower case, without a path and without the default port, or *.",
    ),
]
CacheSalt = Annotated[
    str, Meta(min_length=1, max_length=253, description="A value of cache_salt in requests.")
]


class TLS(ApiStruct, frozen=True):
    """HTTPS with the certificate of a Secret of type kubernetes.io/tls (tls.crt, tls.key)."""

    secret_name: DNSName  #: Name of a Secret in the service's namespace.


class Ingress(ApiStruct, frozen=True):
    """An Ingress for clients outside the cluster. Set only one of ingress and httpRoute."""

    host: DNSName  #: Host name that clients use.
    #: Name of the IngressClass. Unset: the cluster's default class.
    class_name: Annotated[str, Meta(min_length=1, max_length=253)] | None = None
    #: Annotations of the Ingress, for its controller or cert-manager. With gateway.tls, many
    #: controllers need an annotation that the backend serves HTTPS.
    annotations: dict[str, str] | None = None
    #: The Ingress serves HTTPS with the certificate of this Secret. Unset: it serves HTTP.
    tls: TLS | None = None


class ParentReference(ApiStruct, frozen=True):
    """A Gateway of the Gateway API, or one listener of it."""

    name: DNSName  #: Name of the Gateway.
    #: Namespace of the Gateway. Unset: the service's namespace.
    namespace: Annotated[str, Meta(pattern=DNS_NAME, max_length=63)] | None = None
    section_name: DNSName | None = None  #: Name of one listener. Unset: all that match the route.
    #: Port of the listeners. Unset: any port.
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None


class HTTPRoute(ApiStruct, frozen=True):
    """An HTTPRoute of gateway.networking.k8s.io/v1 for clients outside the cluster.

    Set only one of ingress and httpRoute.
    """

    #: The Gateways to which the route attaches.
    parent_refs: Annotated[list[ParentReference], Meta(min_length=1, max_length=32)]
    #: Host names that clients use. Unset: all host names of the listeners.
    hostnames: Annotated[list[Hostname], Meta(max_length=16)] | None = None


class APIKeys(ApiStruct, frozen=True):
    """API keys, which clients send as `Authorization: Bearer KEY`. Unset: no key is required."""

    #: Name of a Secret in the service's namespace, with one entry per client. The entry's value is
    #: the API key of at least 16 characters, and its name is the client's name in logs and metrics.
    #: Shorter keys are ignored. The gateway applies changes while it runs. A request without a
    #: valid key gets 401, except on /health and /ready. If the Secret is empty, every request gets
    #: 401.
    secret_name: DNSName
    #: Requests that share blocks of the prefix cache. key: those of one entry of the Secret.
    #: service: those of all entries. Each client can then find out, by cached_tokens or by time,
    #: whether others have sent a prompt.
    cache_sharing: Literal["key", "service"] = "key"
    #: With cacheSharing key: requests that name one of these values as cache_salt share blocks of
    #: the prefix cache, whatever their entry is. Each client can find out whether others have sent
    #: a prompt with such a value, so use it only for prompts without private text.
    shared_cache_salts: Annotated[list[CacheSalt], Meta(max_length=64)] = msgspec.field(
        default_factory=list
    )


class Limits(ApiStruct, frozen=True):
    """Limits per client and per request."""

    #: Maximum number of sequences that one gateway pod serves at once for one API key. Further
    #: requests get 429 with Retry-After. Needs apiKeys. Unset: no limit.
    max_concurrent_per_key: Requests | None = None
    #: Lowest priority that a request may have. A request with a lower priority gets 400. Lower
    #: values run first and preempt others, and 0 is the priority of requests that set none. So by
    #: default, a request may only let others go first.
    min_priority: Annotated[int, Meta(ge=-(2**31), le=0)] = 0
    #: Maximum length of a prompt in tokens. A longer prompt gets 400. Unset: the model's limit.
    max_prompt_tokens: Tokens | None = None
    #: Maximum number of generated tokens. A request for more gets 400. A request without a length
    #: gets at most this many. Unset: the model's limit.
    max_completion_tokens: Tokens | None = None


class CORS(ApiStruct, frozen=True):
    """Cross-origin resource sharing: the web pages that may call the gateway from a browser."""

    #: Origins of the pages, as in a browser's Origin header: https://chat.example.com, in lower
    #: case, without a path and without the default port. `*`: every origin. Preflights need no API
    #: key, other requests do. Cookies are not allowed. Empty: CORS is off.
    allowed_origins: Annotated[list[Origin], Meta(max_length=64)] = msgspec.field(
        default_factory=list
    )


class Gateway(ApiStruct, frozen=True):
    """The OpenAI-compatible HTTP server to which clients connect."""

    replicas: Annotated[int, Meta(ge=1, le=64)] = 1  #: Number of pods of the gateway Deployment.
    ingress: Ingress | None = None
    http_route: HTTPRoute | None = None
    #: The gateway serves HTTPS on port 443 of its Service, with the certificate of this Secret. It
    #: reloads a renewed certificate while it runs. Unset: it serves HTTP on port 80. A change is
    #: rolled out. Until the last old pod is gone, both ports are open, and each leads to the pods
    #: with its protocol.
    tls: TLS | None = None
    api_keys: APIKeys | None = None
    cors: CORS = CORS()
    limits: Limits = Limits()
    #: Maximum number of sequences that one gateway pod serves at once. Further requests get 429
    #: with Retry-After. Unset: 1024.
    max_concurrent_requests: Requests | None = None
    #: auto: requests that leave out sampling parameters get those of the checkpoint's
    #: generation_config.json: temperature, top_p, top_k, min_p, repetition_penalty and
    #: max_new_tokens. none: they get OpenAI's defaults. Unset: auto.
    generation_config: Literal["auto", "none"] | None = None
    #: Prompts with fewer tokens than this are computed by decode pods instead of prefill pods.
    #: Unset: 0.
    prefill_threshold_tokens: Annotated[int, Meta(ge=0, le=2**24)] | None = None
    #: Seconds for which a new request waits for a decode pod that accepts requests. After this
    #: time it gets 503. Unset: 10.
    queue_timeout_seconds: Annotated[int, Meta(ge=0, le=86400)] | None = None
    #: Seconds for which a request waits for another decode pod after its decode pod was lost. After
    #: this time the request fails. Unset: 30.
    resume_timeout_seconds: Annotated[int, Meta(ge=0, le=86400)] | None = None
    #: Seconds after which a request without progress continues on another decode pod, if one makes
    #: progress. If twice the longest step of an engine is longer, that time applies to the engine.
    #: Unset: 30.
    stall_timeout_seconds: Annotated[int, Meta(ge=1, le=86400)] | None = None
    #: Seconds without a token after which a response that has begun continues on another decode
    #: pod, or fails if there is none within resumeTimeoutSeconds. Unlike stallTimeoutSeconds, it
    #: applies while the pod makes progress with other requests, for example after a preemption. The
    #: time to the first token of each decode pod does not count. 0 or unset: no limit.
    inter_token_timeout_seconds: Annotated[int, Meta(ge=0, le=86400)] | None = None
    #: Maximum duration of a request in seconds. A request that takes longer fails with 504, or with
    #: an error event if its stream has begun. The time in the scale-from-zero queue does not
    #: count. 0 or unset: no limit.
    request_timeout_seconds: Annotated[int, Meta(ge=0, le=604800)] | None = None
    resources: Resources | None = None
    template: Template | None = None


class Security(ApiStruct, frozen=True):
    """Which pods may connect to the pods of the service."""

    #: true: engines accept connections only from the service's gateways, from its engines and from
    #: the operator. The coordinator accepts them only from the service's ranks and from the
    #: operator. The gateway accepts all. The cluster's network plugin must enforce NetworkPolicies.
    #: false: the service has no NetworkPolicies.
    network_policy: bool = True
    #: With networkPolicy: peers that may also connect to the HTTP port of engines and coordinator,
    #: to collect metrics. Example:
    #: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}].
    metrics_from: Annotated[list[Peer], Meta(max_length=16)] = msgspec.field(default_factory=list)
