"""Watches, by kopf: every event about a service, or about what belongs to one, makes the service's key due. Nothing else.

Only `on.event` handlers are registered, so kopf writes nothing into any object: no finalizer, no annotation, no Event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import kopf
from kubernetes.aio import client

from baton_operator import names
from baton_operator.workqueue import Key

_OWNED = (
    ("", "v1", "pods"),
    ("", "v1", "services"),
    ("", "v1", "configmaps"),
    ("apps", "v1", "deployments"),
    ("networking.k8s.io", "v1", "ingresses"),
)


async def watch(
    add: Callable[[Key], None],
    *,
    configuration: client.Configuration,
    in_cluster: bool,
    namespaces: Collection[str],
    stop: asyncio.Event,
) -> None:
    """Runs until `stop` is set or SIGTERM or SIGINT comes; `add` is called on this event loop.

    Args:
        configuration: of the API server, as `kube.connect` loaded it.
        in_cluster: whether credentials are the pod's own; they are read anew when they expire.
        namespaces: empty for all.
    """
    registry = kopf.OperatorRegistry()

    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) if in_cluster else _connection_info(configuration)

    def on_service(namespace: str, name: str, **_: Any) -> None:
        add(Key(namespace, name))

    def on_owned(namespace: str, labels: dict[str, str], **_: Any) -> None:
        if service := labels.get(names.LABEL_SERVICE):
            add(Key(namespace, service))

    kopf.on.login(registry=registry, id="login")(login)
    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry, id="service")(on_service)
    settings = kopf.OperatorSettings()
    for group, version, plural in _OWNED:
        kopf.on.event(group, version, plural, registry=registry, id=f"owned-{plural}")(on_owned)
        settings.watching.label_selectors[group, version, plural] = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = (
        True  # the CRD is there before this starts; no right to watch CRDs or namespaces is needed
    )
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.persistence.finalizer = f"{names.GROUP}/finalizer"  # never written; should that change, it is our own
    await kopf.operator(
        registry=registry,
        settings=settings,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=stop,
    )


def _connection_info(configuration: client.Configuration) -> kopf.ConnectionInfo:
    """kopf's form of the same credentials."""
    scheme, _, token = configuration.api_key.get("BearerToken", "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme if token else None,
        token=token or scheme or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
