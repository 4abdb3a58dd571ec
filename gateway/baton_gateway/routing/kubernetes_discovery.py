"""Discovery of engine pods in Kubernetes: lists and watches pods with the service's label."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from kubernetes.aio.config import ConfigException

from baton_gateway.routing.discovery import ROLES, Discovery
from baton_kube.client import SERVICE_ACCOUNT, KubeClient, Object, connect
from baton_kube.reflector import Reflector
from baton_protocol.config import EngineEndpoint, container_path
from baton_protocol.pod_labels import ANNOTATION_DRAINING, LABEL_ROLE, LABEL_SERVICE

logger = logging.getLogger(__name__)

CONNECT_RETRY_S = 2.0


class KubernetesDiscovery(Discovery):
    """Discovers the running pods of one LLMService that are ready or draining.

    Args:
        namespace: namespace of the LLMService.
        service: name of the LLMService.
        resync_s: interval at which all pods are listed, in case an event of the watch was lost.
    """

    def __init__(self, namespace: str, service: str, *, resync_s: float) -> None:
        self._namespace = namespace
        self._selector = f"{LABEL_SERVICE}={service},{LABEL_ROLE} in ({','.join(ROLES)})"
        self._resync_s = resync_s

    async def watch(self) -> AsyncGenerator[list[EngineEndpoint], None]:
        async with AsyncExitStack() as stack:
            kube = await _connect(stack)
            path = f"/api/v1/namespaces/{self._namespace}/pods"
            pods = Reflector(kube, path, label_selector=self._selector, relist_s=self._resync_s)
            async for _ in await stack.enter_async_context(aclosing(pods.changes())):
                endpoints = (endpoint_of(pod) for _, pod in sorted(pods.objects.items()))
                yield [endpoint for endpoint in endpoints if endpoint is not None]


async def _connect(stack: AsyncExitStack) -> KubeClient:
    """Return a Kubernetes client with the gateway pod's service account.

    Retry until the account is usable.

    In PocketKube, pods are plain processes with their files under $POCKETKUBE_POD_ROOT.
    """
    while True:
        try:
            return await stack.enter_async_context(
                connect(service_account=container_path(str(SERVICE_ACCOUNT)))
            )
        except ConfigException as error:
            logger.warning(
                "the service account is not usable, retrying in %g s: %s",
                CONNECT_RETRY_S,
                error,
            )
            await asyncio.sleep(CONNECT_RETRY_S)


def endpoint_of(pod: Object) -> EngineEndpoint | None:
    """Return the endpoint of `pod`, or None if the gateway must not connect to the pod.

    The gateway connects to pods that have an address, run, and are ready or draining.
    """
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    role = (metadata.get("labels") or {}).get(LABEL_ROLE)
    conditions = status.get("conditions") or []
    ready = any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)
    draining = (
        metadata.get("deletionTimestamp") is not None
        or (metadata.get("annotations") or {}).get(ANNOTATION_DRAINING) == "true"
    )
    if (
        role not in ROLES
        or not status.get("podIP")
        or status.get("phase") != "Running"
        or not (ready or draining)
    ):
        return None
    return EngineEndpoint(name=metadata["name"], role=role, host=status["podIP"], draining=draining)
