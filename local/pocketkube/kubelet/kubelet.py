"""The kubelet: registers its node, serves logs, and runs one worker per pod."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from baton_kube.client import KubeClient, KubeError, Object, connect
from baton_kube.reflector import Reflector
from pocketkube.containers.backoff import BackoffPolicy
from pocketkube.containers.container_runner import Dependencies
from pocketkube.containers.environment import ConfigError, Lookup
from pocketkube.containers.process import ContainerReaper
from pocketkube.event_recorder import EventRecorder
from pocketkube.kubeconfig import certificate_authority
from pocketkube.kubelet.kubelet_server import KubeletServer
from pocketkube.kubelet.node import Node
from pocketkube.kubelet.pod_addresses import AddressPool
from pocketkube.kubelet.pod_worker import PodWorker
from pocketkube.lifecycle import until_stopped, wait_up_to
from pocketkube.loopback import LoopbackAddresses

logger = logging.getLogger(__name__)

#: Grace period of running containers when the kubelet stops.
SHUTDOWN_GRACE_S = 5.0
_COLLECTIONS = {"ConfigMap": "configmaps", "Secret": "secrets", "ServiceAccount": "serviceaccounts"}


@dataclass(frozen=True)
class KubeletConfig:
    """The kubelet's command-line options."""

    kubeconfig: Path
    state_dir: Path
    node_name: str
    address_pool: str
    #: Folder in which the path of a hostPath volume is first looked up, before `/`; None: only `/`.
    host_root: Path | None
    backoff: BackoffPolicy
    #: Interval at which configMap, secret and token files are refreshed.
    refresh_s: float


class Kubelet:
    """Runs the pods bound to one node."""

    def __init__(self, config: KubeletConfig) -> None:
        self._config = config
        self._workers: dict[str, PodWorker] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run the kubelet until `stop` is set, then end all processes of all pods.

        Raises:
            TimeoutError: another kubelet holds the state folder.
            OSError: an address cannot be added to the loopback device, or cannot be bound.
            KubeError: the API server refuses to register the node.
        """
        config = self._config
        reaper = ContainerReaper(config.state_dir)
        await reaper.start()
        loopback = LoopbackAddresses(config.state_dir / "addresses.json")
        loopback.remove_stale()
        try:
            pool = AddressPool(config.address_pool, loopback)
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            async with (
                connect(config.kubeconfig) as api,
                aiohttp.ClientSession(connector=connector) as http,
            ):
                await self._serve(stop, api, reaper, pool, http)
        finally:
            await reaper.stop()
            loopback.remove_all()

    async def _serve(
        self,
        stop: asyncio.Event,
        api: KubeClient,
        reaper: ContainerReaper,
        pool: AddressPool,
        http: aiohttp.ClientSession,
    ) -> None:
        config = self._config
        events = EventRecorder(api, "kubelet", config.node_name)
        authority = certificate_authority(config.kubeconfig)
        dependencies = Dependencies(
            api=api,
            ca_pem=authority,
            events=events,
            reaper=reaper,
            http=http,
            lookup=_lookup(api),
            backoff=config.backoff,
            refresh_s=config.refresh_s,
            host_ip=pool.node_address,
            host_root=config.host_root,
        )
        server = KubeletServer(config.node_name, self._workers, authority)
        port = await server.start(pool.node_address)
        node = Node(api, config.node_name, pool.node_address, port)
        pods = Reflector(api, "/api/v1/pods", field_selector=f"spec.nodeName={config.node_name}")
        pods.subscribe(lambda old, new: self._pod_changed(dependencies, pool, old, new))
        try:
            await _register(node, stop)
            logger.info(
                "node %s is ready; pods get addresses of %s; the kubelet serves on port %d",
                config.node_name,
                pool.network,
                port,
            )
            await until_stopped(
                stop, events.run(), node.run(), pods.run(), self._remove_orphans(pods)
            )
        finally:
            for worker in self._workers.values():
                worker.shut_down(SHUTDOWN_GRACE_S)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.stop()
            with contextlib.suppress(KubeError, OSError):
                await node.write_status(ready=False)

    def _pod_changed(
        self, dependencies: Dependencies, pool: AddressPool, old: Object | None, new: Object | None
    ) -> None:
        replaced = old is not None and (
            new is None or new["metadata"]["uid"] != old["metadata"]["uid"]
        )
        if old is not None and replaced and (gone := self._workers.get(old["metadata"]["uid"])):
            gone.forget()
        if new is None:
            return
        uid = new["metadata"]["uid"]
        if worker := self._workers.get(uid):
            worker.update(new)
            return
        worker = PodWorker(dependencies, pool, self._pods_folder / uid, new)
        self._workers[uid] = worker
        task = asyncio.create_task(worker.run())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._worker_done(uid, done))

    def _worker_done(self, uid: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._workers.pop(uid, None)
        if not task.cancelled() and (error := task.exception()):
            logger.error(
                "running the pod with uid %s failed; the pod's next change starts it again",
                uid,
                exc_info=error,
            )

    @property
    def _pods_folder(self) -> Path:
        return self._config.state_dir / "pods"

    async def _remove_orphans(self, pods: Reflector) -> None:
        """Remove the folders of pods that were deleted while no kubelet ran.

        Then wait until cancelled.
        """
        await pods.synced.wait()
        known = {pod["metadata"]["uid"] for pod in pods.objects.values()}
        if self._pods_folder.is_dir():
            for folder in self._pods_folder.iterdir():
                if folder.name not in known and folder.name not in self._workers:
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await asyncio.Event().wait()  # the end of one loop would end `until_stopped()`


def _lookup(api: KubeClient) -> Lookup:
    async def lookup(kind: str, namespace: str, name: str) -> Object | None:
        try:
            return await api.get(f"/api/v1/namespaces/{namespace}/{_COLLECTIONS[kind]}/{name}")
        except (KubeError, OSError) as error:
            if isinstance(error, KubeError) and error.status == 404:
                return None
            raise ConfigError(
                f"cannot read {_COLLECTIONS[kind]} {namespace}/{name}: {error}"
            ) from error

    return lookup


async def _register(node: Node, stop: asyncio.Event) -> None:
    """Register the node. While the API server is unavailable, retry until `stop` is set.

    Raises:
        KubeError: the API server refuses the registration.
    """
    while not stop.is_set():
        try:
            await node.register()
            return
        except (KubeError, OSError) as error:
            if isinstance(error, KubeError) and error.status not in (429, 500, 503, 504):
                raise
            logger.warning("registering the node failed, retrying in 1 s: %s", error)
        await wait_up_to(1.0, stop)
