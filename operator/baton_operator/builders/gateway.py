"""The gateway: its Deployment, its Service, the schemes of its ports, and its right to watch pods.

`ingress` and `http_route` lead clients outside the cluster to the Service.
"""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders import config, pod
from baton_operator.builders.owner import Owner, Scheme
from baton_protocol.config import GATEWAY_PORT

CONTAINER = "gateway"
#: Shows metrics collectors that a pod serves only HTTPS.
ANNOTATION_SCHEME = "prometheus.io/scheme"
#: Ports of the gateway's Service. Service and pods name a port by its scheme, so each port leads to
#: the pods that serve it.
PORTS: dict[Scheme, int] = {"http": 80, "https": 443}


def served_scheme(owner: Owner) -> Scheme:
    """Return the scheme that new gateway pods serve."""
    return "http" if owner.spec.gateway.tls is None else "https"


def scheme_in_use(owner: Owner) -> Scheme:
    """Return a scheme that a ready gateway serves.

    While TLS is switched on or off, it is the old one until a new pod is ready.
    """
    wanted, ready = served_scheme(owner), owner.gateway_schemes
    return wanted if wanted in ready or not ready else ready[0]


def deployment(owner: Owner) -> Object:
    """Return the Deployment. A new pod is ready before an old one leaves.

    Raises:
        ValueError: the template overlay cannot be merged.
    """
    gateway = owner.spec.gateway
    scheme = served_scheme(owner)
    template = pod.pod_template(
        owner,
        "gateway",
        container={
            "name": CONTAINER,
            "command": ["baton-gateway", "--config", f"{config.MOUNT_PATH}/gateway.json"],
            "env": pod.identity_env(),
            "ports": [{"name": scheme, "containerPort": GATEWAY_PORT, "protocol": "TCP"}],
            "startupProbe": pod.http_probe("/health", period_s=1, failures=120, scheme=scheme),
            "livenessProbe": pod.http_probe("/health", period_s=10, failures=6, scheme=scheme),
            "readinessProbe": pod.http_probe("/ready", period_s=1, failures=3, scheme=scheme),
        },
        pod={"serviceAccountName": names.gateway_name(owner.name), "enableServiceLinks": False},
        template=gateway.template,
        resources=gateway.resources,
        extra=_secret_mounts(owner),
    )
    if scheme == "https":
        template["metadata"].setdefault("annotations", {})[ANNOTATION_SCHEME] = scheme
    template["metadata"]["labels"][names.LABEL_REVISION] = names.content_hash(template)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(names.gateway_name(owner.name), "gateway"),
        "spec": {
            "replicas": gateway.replicas,
            "selector": {"matchLabels": names.selector(owner.name, "gateway")},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": template,
        },
    }


def service(owner: Owner) -> Object:
    """Return the Service, which is the endpoint in the status.

    It has both ports while TLS is switched on or off.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(names.gateway_name(owner.name), "gateway"),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(owner.name, "gateway"),
            "ports": [
                {
                    "name": scheme,
                    "port": PORTS[scheme],
                    "targetPort": scheme,
                    "protocol": "TCP",
                }
                for scheme in sorted({served_scheme(owner), *owner.gateway_schemes})
            ],
        },
    }


def service_account(owner: Owner) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(names.gateway_name(owner.name), "gateway"),
    }


def role(owner: Owner) -> Object:
    """Return the right to watch pods, by which the gateway discovers engines."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": owner.metadata(names.gateway_name(owner.name), "gateway"),
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}],
    }


def role_binding(owner: Owner) -> Object:
    name = names.gateway_name(owner.name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": owner.metadata(name, "gateway"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}],
    }


def _secret_mounts(owner: Owner) -> list[tuple[Object, Object]]:
    """Return (volume, mount) of each Secret that the gateway reads.

    The kubelet starts the pod when the Secrets exist.
    """
    gateway = owner.spec.gateway
    secrets = []
    if gateway.api_keys:
        secrets.append(("api-keys", gateway.api_keys.secret_name, config.API_KEYS_PATH))
    if gateway.tls:
        secrets.append(("tls", gateway.tls.secret_name, config.TLS_PATH))
    return [
        (
            {"name": name, "secret": {"secretName": secret, "defaultMode": 0o444}},
            {"name": name, "mountPath": path, "readOnly": True},
        )
        for name, secret, path in secrets
    ]
