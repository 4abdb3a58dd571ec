"""The gateway's Deployment and Service, and the URL schemes of their ports.

`ingress` and `http_route` build the access to this Service from outside the cluster.
"""

from __future__ import annotations

from baton_kube.client import SERVICE_ACCOUNT, Object
from baton_operator import names
from baton_operator.builders import config_maps
from baton_operator.builders.pod_template import pod
from baton_operator.builders.resolved_service import ResolvedService, Scheme
from baton_protocol.options.config import GATEWAY_METRICS_PORT, GATEWAY_PORT

CONTAINER = "gateway"
#: Lifetime of the account's token. The kubelet renews the token before.
TOKEN_LIFETIME_S = 3600
#: Ports of the gateway's Service by scheme. In Service and pods the scheme is the name of the port,
#: so each port of the Service selects the pods that serve its scheme.
PORTS: dict[Scheme, int] = {"http": 80, "https": 443}


def served_scheme(resolved: ResolvedService) -> Scheme:
    """Return the URL scheme that new gateway pods serve, according to the spec."""
    return "http" if resolved.spec.gateway.tls is None else "https"


def scheme_in_use(resolved: ResolvedService) -> Scheme:
    """Return the URL scheme that clients should use now.

    After an edit of `gateway.tls`, the old scheme is returned until a pod with the new scheme is
    ready.
    """
    wanted, ready = served_scheme(resolved), resolved.gateway_schemes
    return wanted if wanted in ready or not ready else ready[0]


def deployment(resolved: ResolvedService) -> Object:
    """Return the gateway's Deployment. In a rollout, a new pod is ready before an old pod leaves.

    Raises:
        ValueError: the template overlay cannot be merged.
    """
    gateway = resolved.spec.gateway
    scheme = served_scheme(resolved)
    template = pod.pod_template(
        resolved,
        "gateway",
        container={
            "name": CONTAINER,
            "command": ["baton-gateway", "--config", f"{config_maps.MOUNT_PATH}/gateway.json"],
            "env": pod.identity_env(),
            "ports": [
                {"name": scheme, "containerPort": GATEWAY_PORT, "protocol": "TCP"},
                {"name": "metrics", "containerPort": GATEWAY_METRICS_PORT, "protocol": "TCP"},
            ],
            # Not on the clients' port, which clients can fill with connections.
            "startupProbe": pod.http_probe("/health", period_s=1, failures=120, port="metrics"),
            "livenessProbe": pod.http_probe("/health", period_s=10, failures=6, port="metrics"),
            "readinessProbe": pod.http_probe("/ready", period_s=1, failures=3, port="metrics"),
        },
        pod={
            "serviceAccountName": names.gateway_name(resolved.name),
            # An automatic mount would give the token to the init container, too.
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
        },
        template=gateway.template,
        resources=gateway.resources,
        extra=[*_secret_mounts(resolved), _token_mount()],
    )
    template["metadata"]["labels"][names.LABEL_REVISION] = names.content_hash(template)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": resolved.metadata(names.gateway_name(resolved.name), "gateway"),
        "spec": {
            "replicas": gateway.replicas,
            "selector": {"matchLabels": names.selector(resolved.name, "gateway")},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": template,
        },
    }


def revision_of(deployment: Object) -> str:
    """Return the revision of the pods of the gateway's Deployment: the hash of its template."""
    return str(deployment["spec"]["template"]["metadata"]["labels"][names.LABEL_REVISION])


def service(resolved: ResolvedService) -> Object:
    """Return the gateway's Service.

    After an edit of `gateway.tls`, the Service has ports for both schemes while pods of both are
    ready. An annotation shows the gateways that the service is scaled to zero by hand. The
    gateways' configuration does not contain this, because a change of it would replace their pods.
    """
    metadata = resolved.metadata(names.gateway_name(resolved.name), "gateway")
    if resolved.is_scaled_to_zero_by_hand:
        metadata["annotations"] = {names.ANNOTATION_SCALED_TO_ZERO: "true"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(resolved.name, "gateway"),
            "ports": [
                {
                    "name": scheme,
                    "port": PORTS[scheme],
                    "targetPort": scheme,
                    "protocol": "TCP",
                }
                for scheme in sorted({served_scheme(resolved), *resolved.gateway_schemes})
            ],
        },
    }


def _token_mount() -> tuple[Object, Object]:
    """Return (volume, mount) of the account's token, as Kubernetes mounts it automatically.

    Only the gateway's container gets the mount.
    """
    namespace = {"fieldPath": "metadata.namespace", "apiVersion": "v1"}
    sources: list[Object] = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_LIFETIME_S}},
        {
            "configMap": {
                "name": "kube-root-ca.crt",
                "items": [{"key": "ca.crt", "path": "ca.crt"}],
            }
        },
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": namespace}]}},
    ]
    return (
        {"name": "account-token", "projected": {"sources": sources, "defaultMode": 0o644}},
        {"name": "account-token", "mountPath": str(SERVICE_ACCOUNT), "readOnly": True},
    )


def _secret_mounts(resolved: ResolvedService) -> list[tuple[Object, Object]]:
    """Return (volume, mount) for the Secrets with the API keys and the TLS certificate.

    A gateway pod starts only when these Secrets exist.
    """
    gateway = resolved.spec.gateway
    secrets = []
    if gateway.api_keys:
        secrets.append(("api-keys", gateway.api_keys.secret_name, config_maps.API_KEYS_PATH))
    if gateway.tls:
        secrets.append(("tls", gateway.tls.secret_name, config_maps.TLS_PATH))
    return [
        (
            {"name": name, "secret": {"secretName": secret, "defaultMode": 0o444}},
            {"name": name, "mountPath": path, "readOnly": True},
        )
        for name, secret, path in secrets
    ]
