"""The gateway's Deployment."""

from __future__ import annotations

from baton_kube.client import SERVICE_ACCOUNT, Object
from baton_operator import names
from baton_operator.builders import config_maps
from baton_operator.builders.gateway import url_schemes
from baton_operator.builders.pod_template import pod
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.options.config import GATEWAY_METRICS_PORT, GATEWAY_PORT

CONTAINER = "gateway"
#: Lifetime of the account's token in seconds. The kubelet renews the token before it expires.
TOKEN_LIFETIME_S = 3600


def build(resolved: ResolvedService) -> Object:
    """Return the gateway's Deployment.

    In a rollout, an old pod is deleted only after a new pod has become ready.

    Raises:
        ValueError: the template overlay cannot be merged.
    """
    gateway = resolved.spec.gateway
    scheme = url_schemes.served_scheme(resolved)
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
            # Probes use the metrics port, because clients can fill the other port with connections.
            "startupProbe": pod.http_probe("/health", period_s=1, failures=120, port="metrics"),
            "livenessProbe": pod.http_probe("/health", period_s=10, failures=6, port="metrics"),
            "readinessProbe": pod.http_probe("/ready", period_s=1, failures=3, port="metrics"),
        },
        pod={
            "serviceAccountName": names.gateway_name(resolved.name),
            # An automatic mount would also give the token to the init container.
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


def _token_mount() -> tuple[Object, Object]:
    """Return (volume, mount) of the ServiceAccount token, like those that Kubernetes adds.

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
    """Return (volume, mount) of each Secret: API keys and TLS certificate, if the spec has them.

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
