"""Discovery of engine pods in Kubernetes: lists and watches pods with the service's label.

The gateway's Service is also watched, because its annotation shows that the service is scaled to
zero by hand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from kubernetes.aio.config import ConfigException

from baton_gateway.routing.discovery import ROLES, Discovery
from baton_kube.client import SERVICE_ACCOUNT, KubeClient, Object, connect
from baton_kube.reflector import Reflector
from baton_protocol.options.config import EngineEndpoint, container_path
from baton_protocol.process.pod_labels import (
    ANNOTATION_DRAINING,
    ANNOTATION_SCALED_TO_ZERO,
    LABEL_ROLE,
    LABEL_SERVICE,
)

logger = logging.getLogger(__name__)

CONNECT_RETRY_S = 2.0


class KubernetesDiscovery(Discovery):
    """Discovers the running pods of one LLMService that are ready or draining.

    Args:
        namespace: namespace of the LLMService.
        service: name of the LLMService.
        resync_s: interval in seconds at which all objects are listed, in case a watch has lost an
            event.
    """

    def __init__(self, namespace: str, service: str, *, resync_s: float) -> None:
        self._namespace = namespace
        self._service = service
        self._resync_s = resync_s
        self._services: Reflector | None = None

    @property
    def is_scaled_to_zero(self) -> bool:
        services = self._services.objects.values() if self._services is not None else ()
        return any(
            (service["metadata"].get("annotations") or {}).get(ANNOTATION_SCALED_TO_ZERO) == "true"
            for service in services
        )

    async def watch(self) -> AsyncGenerator[list[EngineEndpoint], None]:
        async with AsyncExitStack() as stack:
            kube = await _connect(stack)
            self._services = self._reflector(kube, "services", f"{LABEL_ROLE}=gateway")
            await stack.enter_async_context(_in_background(self._services.run()))
            pods = self._reflector(kube, "pods", f"{LABEL_ROLE} in ({','.join(ROLES)})")
            async for _ in await stack.enter_async_context(aclosing(pods.changes())):
                endpoints = (endpoint_of(pod) for _, pod in sorted(pods.objects.items()))
                yield [endpoint for endpoint in endpoints if endpoint is not None]

    def _reflector(self, kube: KubeClient, resource: str, roles: str) -> Reflector:
        """Return a Reflector, which keeps a local copy of the service's objects of one resource.

        Args:
            kube: the Kubernetes client.
            resource: name of the resource, such as `pods`.
            roles: label selector that restricts the objects by their role.
        """
        return Reflector(
            kube,
            f"/api/v1/namespaces/{self._namespace}/{resource}",
            label_selector=f"{LABEL_SERVICE}={self._service},{roles}",
            relist_s=self._resync_s,
        )


@asynccontextmanager
async def _in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` in a background task until the end of the `with` block."""
    task = asyncio.create_task(work, name="watch of the gateway's Service")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _connect(stack: AsyncExitStack) -> KubeClient:
    """Return a Kubernetes client with the gateway pod's service account.

    Retry until the account's files are usable. `container_path` also finds these files in
    PocketKube (Baton's local cluster), where pods are plain processes.
    """
    while True:
        try:
            return await stack.enter_async_context(
                connect(service_account=container_path(str(SERVICE_ACCOUNT)))
            )
        except ConfigException as error:
            logger.warning(
                "engines cannot be discovered, because the pod's service account is not usable; "
                "retrying in %g s: %s",
                CONNECT_RETRY_S,
                error,
            )
            await asyncio.sleep(CONNECT_RETRY_S)


def endpoint_of(pod: Object) -> EngineEndpoint | None:
    """Return the endpoint of `pod`, or None if the gateway must not connect to the pod.

    The gateway connects to running pods that have an IP address and are ready or draining.
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
