"""Run one pod from its arrival on the node to its deletion."""

from __future__ import annotations

import asyncio
import enum
import logging
import shutil
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from baton_kube.client import KubeError, Object
from baton_kube.reflector import key_of
from pocketkube.conditions import TERMINAL_PHASES
from pocketkube.containers.container_log import ContainerLog
from pocketkube.containers.container_runner import (
    ContainerRunner,
    Dependencies,
    PodContext,
    log_file,
)
from pocketkube.containers.container_state import Waiting
from pocketkube.containers.environment import ConfigError
from pocketkube.containers.volumes import MountError, PodVolumes, with_service_account_token
from pocketkube.kubelet.pod_addresses import AddressPool
from pocketkube.kubelet.pod_status import PodRuntime, inherited_state, pod_status
from pocketkube.timestamps import parse_time

logger = logging.getLogger(__name__)

#: Interval between attempts to make volumes or to allocate an address.
RETRY_S = 2.0
#: Shortest grace period, also for a pod that is deleted without a grace period.
MIN_GRACE_S = 2.0
#: Time limit for writing the last status before the kubelet ends.
LAST_STATUS_S = 2.0

T = TypeVar("T")


class _Cleanup(enum.Enum):
    """What a worker removes after the pod's processes have ended."""

    POD_AND_FOLDER = enum.auto()
    FOLDER = enum.auto()  #: The pod object no longer exists.
    NOTHING = enum.auto()  #: The kubelet ends, and the next kubelet continues the pod.


class PodWorker:
    """Runs one pod, identified by its uid.

    The kubelet calls `update()` and `forget()` when the pod changes in the API server.
    """

    def __init__(
        self, dependencies: Dependencies, pool: AddressPool, folder: Path, pod: Object
    ) -> None:
        self.pod = pod
        #: Init and main containers, by name.
        self.runners: dict[str, ContainerRunner] = {}
        self._dependencies = dependencies
        self._pool = pool
        self._folder = folder
        self._dirty = asyncio.Event()
        self._terminating = asyncio.Event()
        self._cleanup = _Cleanup.POD_AND_FOLDER
        self._deadline = float("inf")
        #: The status that was last written.
        self._written: Object | None = None
        #: None until the pod's address and service account are known.
        self._context: PodContext | None = None
        self._account: Object | None = None
        self._address = ""
        status = pod.get("status") or {}
        policy = pod["spec"].get("restartPolicy") or "Always"
        before = {entry["name"]: entry for entry in status.get("containerStatuses") or []}
        before_init = {entry["name"]: entry for entry in status.get("initContainerStatuses") or []}
        self.runtime = PodRuntime(
            host_ip=dependencies.host_ip,
            start_time=parse_time(status.get("startTime")) or datetime.now(UTC),
            init={
                c["name"]: inherited_state(before_init.get(c["name"], {}), policy, init=True)
                for c in self._init_specs
            },
            main={
                c["name"]: inherited_state(before.get(c["name"], {}), policy)
                for c in pod["spec"]["containers"]
            },
        )
        if self._init_specs:
            for state in self.runtime.main.values():
                if isinstance(state.state, Waiting):
                    state.state = Waiting("PodInitializing")
        self._check_deletion()

    @property
    def uid(self) -> str:
        """The pod's uid."""
        return str(self.pod["metadata"]["uid"])

    @property
    def _path(self) -> str:
        metadata = self.pod["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    def update(self, pod: Object) -> None:
        """Continue with `pod`, a newer version of the pod object from the API server."""
        self.pod = pod
        if self._context is not None:
            self._context.pod = with_service_account_token(pod, self._account)
        self._check_deletion()
        self._dirty.set()

    def forget(self) -> None:
        """Stop the pod's processes. Write no status, because the pod object no longer exists."""
        if self._cleanup is _Cleanup.POD_AND_FOLDER:
            self._cleanup = _Cleanup.FOLDER
        self._terminate(MIN_GRACE_S)

    def shut_down(self, grace_s: float) -> None:
        """Stop the pod's processes because the kubelet ends.

        Keep the pod object and the pod's folder.
        """
        self._cleanup = _Cleanup.NOTHING
        self._terminate(grace_s)

    def log(self, container: str, *, previous: bool) -> tuple[Path, ContainerLog | None] | None:
        """Return the path of a container's log, and the `ContainerLog` that writes the file.

        The `ContainerLog` is None for a previous instance, and for an instance that ran under a
        previous kubelet. The whole result is None if the container has no such instance.

        Args:
            previous: return the log of the previous instance instead of the current one.
        """
        state = self.runtime.main.get(container) or self.runtime.init.get(container)
        if state is None or not state.container_id or (previous and state.restart_count == 0):
            return None
        runner = self.runners.get(container)
        live = runner.log if runner is not None and not previous else None
        return log_file(self._folder / "logs", container, state.restart_count - previous), live

    async def run(self) -> None:
        """Run the pod until its deletion or `shut_down()`, then clean up."""
        writer = asyncio.create_task(self._write_statuses())
        lifecycle = asyncio.create_task(self._lifecycle())
        lifecycle.add_done_callback(self._report_failure)
        try:
            await self._terminating.wait()
            # If only the kubelet stops, the next kubelet continues the pod, so the phase is not
            # final.
            self.runtime.stopping = self._cleanup is not _Cleanup.NOTHING
            await asyncio.gather(*(runner.stop() for runner in self.runners.values()))
        finally:
            for task in (lifecycle, writer):
                task.cancel()
            await asyncio.gather(lifecycle, writer, return_exceptions=True)
        if self._cleanup is _Cleanup.POD_AND_FOLDER:
            await self._delete()
        elif self._cleanup is _Cleanup.NOTHING:
            await self._write_last_status()
        self._pool.release(self._address)
        if self._cleanup is not _Cleanup.NOTHING:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def _init_specs(self) -> list[Object]:
        return self.pod["spec"].get("initContainers") or []

    async def _lifecycle(self) -> None:
        if (self.pod.get("status") or {}).get("phase") in TERMINAL_PHASES:
            return  # ended under a previous kubelet
        self._dirty.set()
        self._address = await self._retry("Failed", self._allocate)
        self._account = await self._retry("FailedMount", self._service_account)
        pod = with_service_account_token(self.pod, self._account)
        addresses = {"status.podIP": self._address, "status.hostIP": self.runtime.host_ip}
        volumes = PodVolumes(
            pod,
            self._folder,
            api=self._dependencies.api,
            ca_pem=self._dependencies.ca_pem,
            lookup=self._dependencies.lookup,
            addresses=addresses,
            host_root=self._dependencies.host_root,
        )
        context = PodContext(
            dependencies=self._dependencies,
            pod=pod,
            pod_ip=self._address,
            volumes=volumes,
            log_folder=self._folder / "logs",
            changed=self._dirty.set,
            grace_deadline=lambda: self._deadline,
        )
        self._context = context
        self._dirty.set()
        await self._retry("FailedMount", volumes.make)
        # Other components see the address once the volumes exist.
        self.runtime.pod_ip = self._address
        self._dirty.set()
        refresher = asyncio.create_task(self._refresh(volumes))
        try:
            await self._run_containers(context)
        finally:
            refresher.cancel()

    async def _run_containers(self, context: PodContext) -> None:
        """Run the init containers in order, then all other containers concurrently."""
        for container in context.pod["spec"].get("initContainers") or []:
            state = self.runtime.init[container["name"]]
            runner = ContainerRunner(context, container, state, init=True)
            self.runners[container["name"]] = runner
            await runner.run()
            if not state.has_succeeded or self._terminating.is_set():
                return
        mains = []
        for container in context.pod["spec"]["containers"]:
            state = self.runtime.main[container["name"]]
            if isinstance(state.state, Waiting):
                state.state = Waiting("ContainerCreating")
            mains.append(ContainerRunner(context, container, state))
            self.runners[container["name"]] = mains[-1]
        await asyncio.gather(*(runner.run() for runner in mains))

    async def _allocate(self) -> str:
        return self._pool.allocate()

    async def _service_account(self) -> Object | None:
        """Return the pod's service account; None if it is the default account and does not exist.

        Raises:
            MountError: the account that the pod names does not exist.
            ConfigError: the account cannot be read.
        """
        named = self.pod["spec"].get("serviceAccountName")
        namespace = self.pod["metadata"]["namespace"]
        account = await self._dependencies.lookup("ServiceAccount", namespace, named or "default")
        if account is None and named and named != "default":
            raise MountError(f"serviceaccount {named!r} not found in namespace {namespace!r}")
        return account

    async def _retry(self, reason: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat `attempt` until it succeeds, and return its result. Record failures as Events."""
        while True:
            try:
                return await attempt()
            except (MountError, ConfigError, OSError) as error:
                self._dependencies.events.record(self.pod, "Pod", reason, str(error))
                logger.warning(
                    "pod %s cannot start, retrying in %g s: %s", key_of(self.pod), RETRY_S, error
                )
            await asyncio.sleep(RETRY_S)

    async def _refresh(self, volumes: PodVolumes) -> None:
        """Refresh configMap, secret and token files every `refresh_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._dependencies.refresh_s)
            volumes.pod = with_service_account_token(self.pod, self._account)
            try:
                await volumes.make()
            except (MountError, OSError) as error:
                self._dependencies.events.record(self.pod, "Pod", "FailedMount", str(error))

    def _check_deletion(self) -> None:
        if self.pod["metadata"].get("deletionTimestamp"):
            self._terminate(max(self.pod["metadata"]["deletionGracePeriodSeconds"], MIN_GRACE_S))

    def _terminate(self, grace_s: float) -> None:
        """Begin to end the pod. Processes that still run after `grace_s` are killed.

        If an earlier call set an earlier deadline, that deadline stays.
        """
        self._deadline = min(self._deadline, asyncio.get_running_loop().time() + grace_s)
        self._terminating.set()

    async def _write_statuses(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            delay = 0.2
            while not await self._write_status():
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)

    async def _write_status(self) -> bool:
        """Write the pod's status if it has changed. Return False if the write must be repeated."""
        observed = self.pod.get("status") or {}
        if observed.get("phase") in TERMINAL_PHASES and self._written is None:
            return True  # a previous kubelet has written the final status
        previous = self._written or observed
        own = {c["type"]: c for c in previous.get("conditions") or []}
        others = {c["type"]: c for c in observed.get("conditions") or []}
        wanted = pod_status(
            self.pod,
            self.runtime,
            {"conditions": list((others | own).values())},
            datetime.now(UTC),
        )
        if all(previous.get(key) == value for key, value in wanted.items()):
            return True
        try:
            await self._dependencies.api.merge(
                f"{self._path}/status", {"metadata": {"uid": self.uid}, "status": wanted}
            )
        except (KubeError, OSError) as error:
            if _is_gone(error):
                return True
            logger.warning("writing the status of pod %s failed: %s", key_of(self.pod), error)
            return False
        self._written = wanted
        return True

    async def _write_last_status(self) -> None:
        """Write the pod's status once before the kubelet ends. Give up after `LAST_STATUS_S`."""
        try:
            async with asyncio.timeout(LAST_STATUS_S):
                await self._write_status()
        except TimeoutError:
            logger.warning(
                "the last status of pod %s was not written within %g s",
                key_of(self.pod),
                LAST_STATUS_S,
            )

    async def _delete(self) -> None:
        """Write the final status, then delete the pod object. Retry until this succeeds."""
        for runner in self.runners.values():
            runner.mark_terminated()
        delay = 0.2
        while self._cleanup is _Cleanup.POD_AND_FOLDER:
            await self._write_status()
            try:
                await self._dependencies.api.delete(self._path, grace_s=0, uid=self.uid)
                return
            except (KubeError, OSError) as error:
                if _is_gone(error):
                    return
                logger.warning(
                    "deleting pod %s failed, retrying in %.1f s: %s", key_of(self.pod), delay, error
                )
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5.0)

    def _report_failure(self, lifecycle: asyncio.Task[None]) -> None:
        """If the task `lifecycle` has failed, log its error and record an Event of the pod."""
        if not lifecycle.cancelled() and (error := lifecycle.exception()):
            logger.error(
                "the kubelet cannot continue pod %s because of an error; delete the pod to retry",
                key_of(self.pod),
                exc_info=error,
            )
            self._dependencies.events.record(
                self.pod, "Pod", "Failed", f"the kubelet failed: {error!r}"
            )


def _is_gone(error: Exception) -> bool:
    """Return whether `error` means that the pod no longer exists or was replaced."""
    return isinstance(error, KubeError) and error.status in (404, 409)
