"""Run one container: start, probes, restarts with backoff, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from baton_kube.client import KubeClient, Object
from baton_kube.reflector import key_of
from pocketkube.containers.backoff import BackoffPolicy
from pocketkube.containers.container_log import ContainerLog, rotated
from pocketkube.containers.container_state import ContainerState, Running, Terminated, Waiting
from pocketkube.containers.environment import (
    ConfigError,
    Lookup,
    base_environment,
    command_line,
    container_environment,
)
from pocketkube.containers.probes import Probe, check_handlers
from pocketkube.containers.process import RUNTIME, ContainerProcess, ContainerReaper, StartError
from pocketkube.containers.volumes import MountError, PodVolumes, in_root
from pocketkube.event_recorder import EventRecorder
from pocketkube.lifecycle import wait_up_to

logger = logging.getLogger(__name__)

#: Longest termination message, as in Kubernetes.
_MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class Dependencies:
    """The clients and settings that all pods of the kubelet share."""

    api: KubeClient
    #: CA of the API server, in PEM.
    ca_pem: bytes
    events: EventRecorder
    reaper: ContainerReaper
    http: aiohttp.ClientSession
    lookup: Lookup
    backoff: BackoffPolicy
    #: Interval at which configMap, secret and token files are refreshed.
    refresh_s: float
    #: The node's address.
    host_ip: str
    #: Folder in which the path of a hostPath volume is first looked up, before `/`; None: only `/`.
    host_root: Path | None


@dataclass
class PodContext:
    """State that the containers of one pod share.

    The pod worker replaces `pod` when the API server has a newer version of the pod.
    """

    dependencies: Dependencies
    pod: Object
    pod_ip: str
    volumes: PodVolumes
    log_folder: Path
    #: Called after a change of a ContainerState.
    changed: Callable[[], None]
    #: Returns the event-loop time at which a stopping container is killed.
    grace_deadline: Callable[[], float]


class ContainerRunner:
    """Runs one container until its restart policy forbids a restart, or until it is stopped."""

    def __init__(
        self, context: PodContext, container: Object, state: ContainerState, *, init: bool = False
    ) -> None:
        self.container = container
        self.state = state
        #: Log of the current or last instance.
        self.log: ContainerLog | None = None
        self._context = context
        self._init = init
        self._process: ContainerProcess | None = None
        self._stopping = asyncio.Event()
        #: Not set while `run()` runs.
        self._stopped = asyncio.Event()
        self._stopped.set()

    @property
    def process(self) -> ContainerProcess | None:
        """The process of the running instance; None while no instance runs."""
        return self._process if self._process is not None and self._process.is_running else None

    async def run(self) -> None:
        """Run the container until it has ended and will not be restarted."""
        delay = 0.0
        self._stopped.clear()
        try:
            while not self._stopping.is_set() and not self._finished():
                ran = await self._run_once()
                if self._finished() or self._stopping.is_set():
                    return
                delay = self._context.dependencies.backoff.next_delay(delay, ran)
                await self._back_off(delay)
        finally:
            self._stopped.set()

    async def stop(self) -> None:
        """Stop the container within the pod's grace period, and wait for `run` to return."""
        self._stopping.set()
        if (process := self.process) is not None:
            await self._terminate(process, "Stopping container", self._context.grace_deadline)
        await self._stopped.wait()

    def mark_terminated(self) -> None:
        """Change the state of a waiting container to terminated. Call this after `stop()`."""
        if isinstance(self.state.state, Waiting):
            self.state.state = self.state.last or Terminated(
                137,
                "ContainerStatusUnknown",
                "the pod was deleted before this container ran",
            )
            self.state.last = None

    def _finished(self) -> bool:
        if not isinstance(self.state.state, Terminated):
            return False
        policy = self._context.pod["spec"].get("restartPolicy") or "Always"
        if self.state.has_succeeded:
            return self._init or policy in ("Never", "OnFailure")
        return policy == "Never"

    async def _run_once(self) -> float:
        """Start one instance, wait until it ends, and return the seconds for which it ran.

        The result is 0 if the instance did not start.
        """
        loop = asyncio.get_running_loop()
        try:
            environment, argv, root = await self._prepare()
            if self._stopping.is_set():
                return 0.0
            process, instance = self._start(environment, argv, root)
        except (ConfigError, MountError, StartError, OSError, ValueError) as error:
            configuration = isinstance(error, (ConfigError, ValueError))
            reason = "CreateContainerConfigError" if configuration else "CreateContainerError"
            self.state.state = Waiting(reason, str(error))
            self._context.changed()
            self._event("Failed", f"Error: {error}")
            return 0.0
        began, started_at = loop.time(), datetime.now(UTC)
        self._process = process
        self.state.container_id = RUNTIME + instance
        self.state.state = Running(started_at)
        self._context.changed()
        self._event(
            "Started", f"Started container {self.container['name']} (process {process.pid})"
        )
        code = await self._wait(process)
        self.state.started = self.state.ready = False
        self.state.state = Terminated(
            code,
            "Completed" if code == 0 else "Error",
            self._termination_message(root, code),
            started_at=started_at,
            finished_at=datetime.now(UTC),
            container_id=self.state.container_id,
        )
        self._context.changed()
        return loop.time() - began

    async def _wait(self, process: ContainerProcess) -> int:
        """Run the probes until `process` ends. Then clean up, and return the exit code."""
        probes = asyncio.create_task(self._run_probes(process))
        try:
            return await process.wait()
        finally:
            probes.cancel()
            (outcome,) = await asyncio.gather(probes, return_exceptions=True)
            if isinstance(outcome, Exception):
                logger.error(
                    "the probes of container %s of pod %s have ended with an error",
                    self.container["name"],
                    key_of(self._context.pod),
                    exc_info=outcome,
                )
            await process.finish()
            assert self.log is not None
            self.log.close()
            self._process = None

    async def _prepare(self) -> tuple[dict[str, str], list[str], Path]:
        context, dependencies = self._context, self._context.dependencies
        check_handlers(self.container)
        root = context.volumes.mount(self.container)
        base = base_environment(context.pod, pod_ip=context.pod_ip, server=dependencies.api.server)
        base["POCKETKUBE_POD_ROOT"] = str(root)
        addresses = {"status.podIP": context.pod_ip, "status.hostIP": dependencies.host_ip}
        environment = await container_environment(
            context.pod, self.container, base, addresses, dependencies.lookup
        )
        # The pod cannot override these: the process needs its mounts and its address.
        environment |= {"POCKETKUBE_POD_ROOT": str(root), "POD_IP": context.pod_ip}
        in_root(root, self._message_path()).parent.mkdir(parents=True, exist_ok=True)
        return environment, command_line(self.container, environment), root

    def _start(
        self, environment: dict[str, str], argv: list[str], root: Path
    ) -> tuple[ContainerProcess, str]:
        restart = self.state.restart_count + 1 if self.state.container_id else 0
        cwd = in_root(root, self.container.get("workingDir") or "/")
        cwd.mkdir(parents=True, exist_ok=True)
        instance = uuid.uuid4().hex
        output = ContainerLog(log_file(self._context.log_folder, self.container["name"], restart))
        try:
            process = ContainerProcess.start(
                argv, environment, cwd, self._context.dependencies.reaper, instance, output
            )
        except StartError:
            output.close()
            output.path.unlink()
            raise
        self.log = output
        self.state.restart_count = restart
        if isinstance(self.state.state, Terminated):
            self.state.last = self.state.state
        _drop_old_logs(output.path.parent, restart)
        return process, instance

    async def _run_probes(self, process: ContainerProcess) -> None:
        """Run the probes of the container instance `process`, and update the container's state.

        If the startup or the liveness probe fails, terminate the instance. The caller cancels this
        method when the instance ends.
        """
        if startup := self._probe("startup"):
            healthy, failure = await startup.next_verdict()
            if not healthy:
                await self._kill_unhealthy(process, f"failed its startup probe: {failure}")
                return
        readiness, liveness = self._probe("readiness"), self._probe("liveness")
        self.state.started, self.state.ready = True, readiness is None
        self._context.changed()
        loops = []
        if readiness is not None:
            loops.append(self._watch_readiness(readiness))
        if liveness is not None:
            loops.append(self._watch_liveness(liveness, process))
        await asyncio.gather(*loops)

    def _probe(self, kind: str) -> Probe | None:
        spec = self.container.get(f"{kind}Probe")
        if not spec:
            return None

        def on_failure(message: str) -> None:
            self._event("Unhealthy", f"{kind.capitalize()} probe failed: {message}")

        context = self._context
        return Probe(spec, self.container, context.pod_ip, context.dependencies.http, on_failure)

    async def _watch_readiness(self, probe: Probe) -> None:
        while True:
            healthy, _ = await probe.next_verdict()
            if healthy != self.state.ready:
                self.state.ready = healthy
                self._context.changed()

    async def _watch_liveness(self, probe: Probe, process: ContainerProcess) -> None:
        healthy = True
        while healthy:
            healthy, failure = await probe.next_verdict()
        await self._kill_unhealthy(process, f"failed its liveness probe: {failure}")

    async def _kill_unhealthy(self, process: ContainerProcess, why: str) -> None:
        if self._stopping.is_set():
            return
        grace_s = self._context.pod["spec"]["terminationGracePeriodSeconds"]
        deadline = asyncio.get_running_loop().time() + grace_s
        self.state.ready = False
        self._context.changed()
        # This code runs in the task of the probes, which is cancelled when the instance ends.
        # shield() lets the termination continue.
        await asyncio.shield(
            self._terminate(process, f"Container {self.container['name']} {why}", lambda: deadline)
        )

    async def _terminate(
        self, process: ContainerProcess, why: str, deadline: Callable[[], float]
    ) -> None:
        """Send SIGTERM to `process`, and kill it if it still runs at `deadline()`.

        `deadline()` returns an event-loop time, which may become earlier while this method waits.
        """
        loop = asyncio.get_running_loop()
        self._event("Killing", why)
        process.terminate()
        while process.is_running and (left := deadline() - loop.time()) > 0:
            # Checked at least twice a second: a second DELETE can shorten the grace period.
            with contextlib.suppress(TimeoutError):
                await process.wait(min(left, 0.5))
        if process.is_running:
            await process.finish()

    async def _back_off(self, delay: float) -> None:
        ended, name = self.state.state, self.container["name"]
        if isinstance(ended, Terminated):
            pod = self._context.pod["metadata"]
            where = f"container={name} pod={pod['name']}_{pod['namespace']}({pod['uid']})"
            self.state.last = ended
            self.state.state = Waiting(
                "CrashLoopBackOff", f"back-off {delay:g}s restarting failed {where}"
            )
            self._event(
                "BackOff",
                f"Back-off {delay:g}s restarting container {name}: exit code {ended.exit_code}",
            )
            self._context.changed()
        await wait_up_to(delay, self._stopping)

    def _message_path(self) -> str:
        return str(self.container.get("terminationMessagePath") or "/dev/termination-log")

    def _termination_message(self, root: Path, code: int) -> str:
        try:
            with open(in_root(root, self._message_path()), "rb") as file:
                message = file.read(_MESSAGE_BYTES).decode("utf-8", "replace")
        except OSError:
            message = ""
        fallback = self.container.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if not message and fallback and code != 0 and self.log is not None:
            return self.log.tail()
        return message

    def _event(self, reason: str, message: str) -> None:
        group = "initContainers" if self._init else "containers"
        path = f"spec.{group}{{{self.container['name']}}}"
        self._context.dependencies.events.record(
            self._context.pod, "Pod", reason, message, field_path=path
        )


def _drop_old_logs(folder: Path, restart: int) -> None:
    """Remove all logs in `folder` except those of the current and the previous instance.

    Args:
        restart: the restart count of the container, which is the number of the current instance.
    """
    for path in folder.iterdir():
        if int(path.name.split(".")[0]) < restart - 1:
            path.unlink(missing_ok=True)
            rotated(path).unlink(missing_ok=True)


def log_file(folder: Path, container: str, restart: int) -> Path:
    """Return the log path of the container instance that started after `restart` restarts."""
    return folder / container / f"{restart}.log"
