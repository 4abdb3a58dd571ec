"""One container: its start, probes, restarts and stop, with real processes and no API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton_kube.client import Object
from pocketkube.containers.backoff import BackoffPolicy
from pocketkube.containers.container_runner import ContainerRunner, Dependencies, PodContext
from pocketkube.containers.container_state import ContainerState, Running, Terminated, Waiting
from pocketkube.containers.process import ContainerReaper
from pocketkube.containers.volumes import PodVolumes
from support.http_server import serving
from support.waiting import until

PROBE = {"periodSeconds": 0.01, "timeoutSeconds": 30, "successThreshold": 1, "failureThreshold": 1}
SLEEP = "exec sleep 600"


@dataclass
class Events:
    """Stands in for the EventRecorder."""

    recorded: list[tuple[str, str]] = field(default_factory=list)

    def record(self, obj: Object, kind: str, reason: str, message: str, **_: Any) -> None:
        self.recorded.append((reason, message))

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.recorded]


class Pod:
    """The context of a pod whose containers a test runs."""

    def __init__(self, folder: Path, reaper: ContainerReaper, http: aiohttp.ClientSession) -> None:
        self.events = Events()
        self.grace_s = 30.0
        self.pod: Object = {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"terminationGracePeriodSeconds": 30},
        }
        api: Any = SimpleNamespace(server="https://127.0.0.1:1")
        backoff = BackoffPolicy(base_s=0.01, cap_s=0.01)
        events: Any = self.events
        lookup: Any = None
        dependencies = Dependencies(
            api, b"", events, reaper, http, lookup, backoff, 1.0, "127.0.0.1", None
        )
        volumes = PodVolumes(self.pod, folder / "pod", api, b"", lookup, {})
        self.logs = folder / "logs"
        self.context = PodContext(
            dependencies,
            self.pod,
            "127.0.0.1",
            volumes,
            self.logs,
            changed=lambda: None,
            grace_deadline=lambda: asyncio.get_running_loop().time() + self.grace_s,
        )
        self._running: list[tuple[ContainerRunner, asyncio.Task[None]]] = []

    def runner(self, script: str, *, init: bool = False, **more: Any) -> ContainerRunner:
        container = {"name": "main", "command": ["sh", "-c", script], **more}
        return ContainerRunner(self.context, container, ContainerState(), init=init)

    async def started(self, runner: ContainerRunner) -> asyncio.Task[None]:
        """Run `runner` in a task, and wait until its process runs."""
        task = asyncio.create_task(runner.run())
        self._running.append((runner, task))
        await until(lambda: isinstance(runner.state.state, Running), "the container to run")
        return task

    async def close(self) -> None:
        self.grace_s = 0.0
        for runner, task in self._running:
            await runner.stop()
            await task


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    reaper = ContainerReaper(tmp_path / "state")
    await reaper.start()
    async with aiohttp.ClientSession() as http:
        pod = Pod(tmp_path, reaper, http)
        yield pod
        await pod.close()
    await reaper.stop()


async def run(runner: ContainerRunner) -> None:
    """Run the container to its end. A container that is restarted forever fails the test."""
    async with asyncio.timeout(30):
        await runner.run()


def terminated(runner: ContainerRunner) -> Terminated:
    assert isinstance(runner.state.state, Terminated)
    return runner.state.state


@pytest.mark.parametrize(
    ("policy", "code", "init"),
    [("Never", 3, False), ("OnFailure", 0, False), ("Never", 0, False), ("Always", 0, True)],
)
async def test_a_container_that_its_policy_does_not_restart_runs_once(
    pod: Pod, policy: str, code: int, init: bool
) -> None:
    pod.pod["spec"]["restartPolicy"] = policy
    runner = pod.runner(f"exit {code}", init=init)
    await run(runner)
    assert terminated(runner).exit_code == code
    assert terminated(runner).reason == ("Error" if code else "Completed")
    assert (runner.state.restart_count, runner.process) == (0, None)
    assert pod.events.reasons == ["Started"]


@pytest.mark.parametrize("init", [False, True])
async def test_a_container_restarts_on_failure_until_it_succeeds(pod: Pod, init: bool) -> None:
    pod.pod["spec"]["restartPolicy"] = "OnFailure"
    count = pod.logs.parent / "count"
    runner = pod.runner(
        f"echo run; echo x >> {count}; [ $(wc -l < {count}) = 4 ] || exit 7", init=init
    )
    await run(runner)
    assert (terminated(runner).exit_code, runner.state.restart_count) == (0, 3)
    assert runner.state.last is not None
    assert runner.state.last.exit_code == 7
    assert pod.events.reasons == ["Started", "BackOff"] * 3 + ["Started"]
    logs = sorted(path.name for path in (pod.logs / "main").iterdir())
    assert logs == ["2.log", "3.log"], "logs of the last two instances are kept"


async def test_between_two_instances_the_container_waits_with_its_last_exit_code(pod: Pod) -> None:
    seen: list[tuple[Waiting, Terminated | None]] = []

    def changed() -> None:
        if isinstance(runner.state.state, Waiting):
            seen.append((runner.state.state, runner.state.last))
            pod.pod["spec"]["restartPolicy"] = "Never"

    pod.context.changed = changed
    runner = pod.runner("exit 78")
    await run(runner)
    [(waiting, last)] = seen
    assert waiting.reason == "CrashLoopBackOff"
    assert waiting.message == "back-off 0.01s restarting failed container=main pod=p_ns(u)"
    assert last is not None
    assert last.exit_code == 78


@pytest.mark.parametrize(
    ("container", "reason", "message"),
    [
        ({"command": ["no-such-command"]}, "CreateContainerError", "no-such-command"),
        ({"command": []}, "CreateContainerConfigError", "has no command"),
        ({"lifecycle": {"preStop": {}}}, "CreateContainerConfigError", "lifecycle hooks"),
        ({"workingDir": "../.."}, "CreateContainerError", "must not contain '..'"),
    ],
)
async def test_a_container_that_cannot_start_waits_with_the_reason(
    pod: Pod, container: Object, reason: str, message: str
) -> None:
    runner = pod.runner("exit 0", **container)
    task = asyncio.create_task(runner.run())
    await until(lambda: pod.events.reasons.count("Failed") >= 2, "two failed starts")
    await runner.stop()
    await task
    assert isinstance(runner.state.state, Waiting)
    assert runner.state.state.reason == reason
    assert message in runner.state.state.message
    assert (runner.state.restart_count, runner.state.container_id) == (0, "")


@pytest.mark.parametrize(
    ("script", "policy", "message"),
    [
        ("echo why > $POCKETKUBE_POD_ROOT/dev/termination-log; exit 1", "File", "why\n"),
        ("echo log; exit 1", "File", ""),
        ("echo log; exit 1", "FallbackToLogsOnError", "log\n"),
        ("echo log; exit 0", "FallbackToLogsOnError", ""),
    ],
)
async def test_the_termination_message_is_that_of_its_file_or_by_policy_the_end_of_the_log(
    pod: Pod, script: str, policy: str, message: str
) -> None:
    pod.pod["spec"]["restartPolicy"] = "Never"
    runner = pod.runner(script, terminationMessagePolicy=policy)
    await run(runner)
    assert terminated(runner).message == message


async def test_a_stopped_container_gets_sigterm_and_is_not_restarted(
    pod: Pod, tmp_path: Path
) -> None:
    script = f"trap 'exit 5' TERM; touch {tmp_path}/up; while true; do sleep 0.01; done"
    runner = pod.runner(script)
    task = await pod.started(runner)
    await until((tmp_path / "up").exists, "the trap to be set")
    await runner.stop()
    await task
    assert (terminated(runner).exit_code, runner.process) == (5, None)
    assert pod.events.reasons == ["Started", "Killing"]


async def test_a_container_that_ignores_sigterm_is_killed_at_the_end_of_the_grace_period(
    pod: Pod, tmp_path: Path
) -> None:
    runner = pod.runner(f"trap '' TERM; touch {tmp_path}/up; {SLEEP}")
    task = await pod.started(runner)
    await until((tmp_path / "up").exists, "the trap to be set")
    pod.grace_s = 0.0
    await runner.stop()
    await task
    assert terminated(runner).exit_code == 137


async def test_a_container_that_never_ran_is_marked_as_terminated_after_its_stop(pod: Pod) -> None:
    runner = pod.runner("exit 0")
    await runner.stop()
    runner.mark_terminated()
    assert (terminated(runner).exit_code, terminated(runner).reason) == (
        137,
        "ContainerStatusUnknown",
    )


async def test_a_container_without_probes_is_started_and_ready_while_it_runs(pod: Pod) -> None:
    runner = pod.runner(SLEEP)
    task = await pod.started(runner)
    await until(lambda: runner.state.started and runner.state.is_ready, "the container to be ready")
    await runner.stop()
    await task
    assert (runner.state.started, runner.state.ready) == (False, False)


class Health:
    """Answers probes with the HTTP status of their path."""

    def __init__(self) -> None:
        self.codes = {"startup": 503, "readiness": 503, "liveness": 200}

    async def answer(self, request: web.Request) -> web.Response:
        return web.Response(status=self.codes[request.match_info["probe"]])


@pytest.fixture
async def health() -> AsyncIterator[tuple[Health, Callable[..., Object]]]:
    """Probe responses that a test changes, and a function that makes the named probes."""
    health = Health()
    async with serving(web.get("/{probe}", health.answer)) as port:

        def probes(*kinds: str, **more: Any) -> Object:
            return {
                f"{kind}Probe": PROBE | more | {"httpGet": {"path": f"/{kind}", "port": port}}
                for kind in kinds
            }

        yield health, probes


async def test_readiness_follows_its_probe_once_the_startup_probe_has_passed(
    pod: Pod, health: tuple[Health, Callable[..., Object]]
) -> None:
    answers, probes = health
    answers.codes["readiness"] = 200
    runner = pod.runner(SLEEP, **probes("startup", "readiness", failureThreshold=10**9))
    runner.container["readinessProbe"]["failureThreshold"] = 1
    await pod.started(runner)
    await until(lambda: pod.events.reasons.count("Unhealthy") >= 2, "failures of the startup probe")
    assert (runner.state.started, runner.state.ready) == (False, False)
    answers.codes["startup"] = 200
    await until(lambda: runner.state.is_ready, "the container to be ready")
    assert runner.state.started
    answers.codes["readiness"] = 503
    await until(lambda: not runner.state.ready, "the container not to be ready")
    assert runner.state.started
    assert runner.process is not None, "a failed readiness probe does not restart the container"


@pytest.mark.parametrize("kind", ["startup", "liveness"])
async def test_a_container_that_fails_its_startup_or_liveness_probe_is_restarted(
    pod: Pod, health: tuple[Health, Callable[..., Object]], kind: str
) -> None:
    answers, probes = health
    answers.codes[kind] = 503
    runner = pod.runner(SLEEP, **probes(kind))
    await pod.started(runner)
    await until(lambda: runner.state.restart_count >= 1, "a restart")
    assert runner.state.last is not None
    assert runner.state.last.exit_code == 143
    killing = next(message for reason, message in pod.events.recorded if reason == "Killing")
    assert killing.startswith(f"Container main failed its {kind} probe: HTTP status 503")
