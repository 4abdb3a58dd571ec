"""Discovery of engine pods in Kubernetes: list, then watch Pods by label, with a full re-list every `resync_s`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import aiohttp
from kubernetes.aio import client, config, watch
from kubernetes.aio.config.incluster_config import (
    SERVICE_CERT_FILENAME,
    SERVICE_TOKEN_FILENAME,
    InClusterConfigLoader,
)

from baton_engine.protocol.config import EngineEndpoint, container_path
from baton_gateway.discovery import ROLES, Discovery

logger = logging.getLogger(__name__)

LABEL_NAME = "app.kubernetes.io/name"
LABEL_SERVICE = "serving.baton.dev/service"
LABEL_ROLE = "serving.baton.dev/role"
ANNOTATION_DRAINING = "serving.baton.dev/draining"

_MAX_BACKOFF_S = 5.0
_FAILURES = (client.ApiException, aiohttp.ClientError, config.ConfigException, OSError, TimeoutError, ValueError)


class KubernetesDiscovery(Discovery):
    """Pods of one LLMService that run and are ready.

    Args:
        namespace, service: where to look and the value of the service label.
        resync_s: a watch ends after this long and everything is listed anew, so a lost event lives this long at most.
    """

    def __init__(self, namespace: str, service: str, *, resync_s: float) -> None:
        self._namespace = namespace
        self._selector = f"{LABEL_SERVICE}={service},{LABEL_ROLE} in ({','.join(ROLES)})"
        self._resync_s = resync_s

    async def watch(self) -> AsyncGenerator[list[EngineEndpoint], None]:
        backoff_s = 0.2
        while True:
            try:
                async with aclosing(self._list_and_watch()) as sets:
                    async for endpoints in sets:
                        backoff_s = 0.2
                        yield endpoints
                await asyncio.sleep(0.1)  # a server that ends every watch at once must not be listed in a busy loop
            except _FAILURES as error:
                if getattr(error, "status", None) != 410:  # 410: the watch was too old, which a new list heals
                    logger.warning("watching pods failed, listing again in %.1f s: %s", backoff_s, error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _list_and_watch(self) -> AsyncGenerator[list[EngineEndpoint], None]:
        """One list and the watch that follows it, until resync_s is over or a failure."""
        async with AsyncExitStack() as stack:
            api_client = await stack.enter_async_context(client.ApiClient(in_cluster_configuration()))
            api = client.CoreV1Api(api_client)
            listed = await api.list_namespaced_pod(self._namespace, label_selector=self._selector, _request_timeout=10)
            pods = {pod.metadata.name: api_client.sanitize_for_serialization(pod) for pod in listed.items}
            yield endpoints_of(pods)
            watcher = watch.Watch(return_type="object")
            stack.push_async_callback(watcher.close)
            events = watcher.stream(
                api.list_namespaced_pod,
                self._namespace,
                label_selector=self._selector,
                resource_version=listed.metadata.resource_version,
                timeout_seconds=max(1, round(self._resync_s)),
                _request_timeout=self._resync_s + 5,  # a watch that hangs without an end ends, too
            )
            async for event in events:
                pod = event["raw_object"]
                if event["type"] == "DELETED":
                    pods.pop(pod["metadata"]["name"], None)
                elif event["type"] in ("ADDED", "MODIFIED"):
                    pods[pod["metadata"]["name"]] = pod
                else:
                    continue
                yield endpoints_of(pods)


def in_cluster_configuration() -> Any:
    """The service account's configuration. A pod that runs as a plain process has its token under $BATON_POD_ROOT.

    Raises:
        ConfigException: not in a cluster (no KUBERNETES_SERVICE_HOST or no token file).
    """
    configuration = client.Configuration()
    loader = InClusterConfigLoader(
        token_filename=str(container_path(SERVICE_TOKEN_FILENAME)),
        cert_filename=str(container_path(SERVICE_CERT_FILENAME)),
    )
    loader.load_and_set(configuration)
    return configuration


def endpoints_of(pods: dict[str, dict[str, Any]]) -> list[EngineEndpoint]:
    """Endpoints of pods (as API objects, by name) that can be talked to."""
    endpoints = (endpoint_of(pod) for _, pod in sorted(pods.items()))
    return [endpoint for endpoint in endpoints if endpoint is not None]


def endpoint_of(pod: dict[str, Any]) -> EngineEndpoint | None:
    """None unless the pod has an address, runs and is ready or on its way out (draining)."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    role = (metadata.get("labels") or {}).get(LABEL_ROLE)
    conditions = status.get("conditions") or []
    ready = any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)
    draining = (
        metadata.get("deletionTimestamp") is not None
        or (metadata.get("annotations") or {}).get(ANNOTATION_DRAINING) == "true"
    )
    if role not in ROLES or not status.get("podIP") or status.get("phase") != "Running" or not (ready or draining):
        return None
    return EngineEndpoint(name=metadata["name"], role=role, host=status["podIP"], draining=draining)
