"""The kubelet's pure parts: status, backoff, environment, quantities, probe thresholds, logs, process guard."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kube.client import KubeError
from baton_local.kubelet import guardian
from baton_local.kubelet.backoff import BackoffPolicy
from baton_local.kubelet.env import (
    ConfigError,
    command_line,
    container_environment,
    expand,
    field_value,
)
from baton_local.kubelet.kubelet import _lookup
from baton_local.kubelet.logs import ContainerLog, stream_log
from baton_local.kubelet.probes import ProbeTiming, ProbeVerdict
from baton_local.kubelet.quantity import in_units_of, parse_quantity
from baton_local.kubelet.runtime import Guard, Process
from baton_local.kubelet.status import (
    ContainerState,
    PodRuntime,
    Running,
    Terminated,
    Waiting,
    inherited_state,
    pod_phase,
    pod_status,
)
from baton_local.kubelet.volumes import (
    TOKEN_PATH,
    MountError,
    PodVolumes,
    with_service_account_token,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
POD = {
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "0123456789",
        "labels": {"b": "2", "a": '1"'},
    },
    "spec": {"containers": [{"name": "main", "command": ["x"]}], "nodeName": "n"},
}
ADDRESSES = {"status.podIP": "127.77.0.2", "status.hostIP": "127.77.0.1"}


def ended(code: int) -> Terminated:
    return Terminated(code, "Completed" if code == 0 else "Error", "", NOW, NOW, "process://x")


def runtime(state: Waiting | Running | Terminated, *, ready: bool = False) -> PodRuntime:
    return PodRuntime(
        "127.77.0.1",
        "127.77.0.2",
        NOW,
        main={"main": ContainerState(state, started=True, ready=ready)},
    )


@pytest.mark.parametrize(
    ("state", "policy", "phase"),
    [
        (Waiting(), "Always", "Pending"),
        (Running(NOW), "Always", "Running"),
        (ended(0), "Never", "Succeeded"),
        (ended(1), "Never", "Failed"),
        (ended(1), "OnFailure", "Running"),
        (ended(0), "OnFailure", "Succeeded"),
        (ended(0), "Always", "Running"),
    ],
)
def test_phase_follows_states_and_restart_policy(
    state: Waiting | Running | Terminated, policy: str, phase: str
) -> None:
    assert pod_phase({"spec": {"restartPolicy": policy}}, runtime(state)) == phase


def test_a_condition_keeps_its_transition_time_until_it_flips() -> None:
    first = pod_status(POD, runtime(Running(NOW), ready=True), {}, NOW)
    later = pod_status(POD, runtime(Running(NOW), ready=True), first, NOW + timedelta(minutes=1))
    assert later == first
    flipped = pod_status(POD, runtime(Running(NOW)), later, NOW + timedelta(minutes=2))
    times = {c["type"]: c["lastTransitionTime"] for c in flipped["conditions"]}
    assert times["Ready"] == "2026-01-01T00:02:00Z"
    assert times["Initialized"] == "2026-01-01T00:00:00Z"


def test_conditions_of_others_pass_through() -> None:
    foreign = {
        "type": "DisruptionTarget",
        "status": "True",
        "lastTransitionTime": "2025-01-01T00:00:00Z",
    }
    assert (
        foreign
        in pod_status(POD, runtime(Running(NOW)), {"conditions": [foreign]}, NOW)["conditions"]
    )


def test_a_new_kubelet_counts_what_ran_as_ended() -> None:
    before = {
        "restartCount": 3,
        "containerID": "process://old",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    state = inherited_state(before, "Always")
    assert isinstance(state.state, Waiting)
    assert state.last is not None
    assert (state.last.exit_code, state.restart_count) == (137, 3)
    assert isinstance(inherited_state(before, "Never").state, Terminated)
    completed = {**before, "state": {"terminated": {"exitCode": 0}}}
    assert isinstance(inherited_state(completed, "OnFailure").state, Terminated)
    assert isinstance(inherited_state(completed, "Always").state, Waiting)


@given(runs=st.lists(st.floats(0, 200), max_size=30))
def test_backoff_stays_in_bounds_and_forgets_after_a_long_run(runs: list[float]) -> None:
    policy = BackoffPolicy(base_s=1, cap_s=30, reset_after_s=60)
    delay = 0.0
    for ran in runs:
        after = policy.next_delay(delay, ran)
        assert 1 <= after <= 30
        assert after == 1 if ran >= 60 or delay == 0 else after == min(2 * delay, 30)
        delay = after


def test_expansion_knows_escapes_and_leaves_unknown_names() -> None:
    variables = {"A": "1", "B_2": "two"}
    assert expand("$(A)-$(B_2)-$(C)-$$(A)-$A-$", variables) == "1-two-$(C)-$(A)-$A-$"


async def test_environment_entries_build_on_each_other_and_missing_keys_are_errors() -> None:
    objects = {("ConfigMap", "c"): {"data": {"k": "v"}}, ("Secret", "s"): {"data": {"t": "aGk="}}}

    async def lookup(kind: str, namespace: str, name: str) -> dict[str, object] | None:
        return objects.get((kind, name))

    container = {
        "name": "main",
        "envFrom": [
            {"prefix": "P_", "configMapRef": {"name": "c"}},
            {"secretRef": {"name": "absent", "optional": True}},
        ],
        "env": [
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "t"}}},
            {"name": "BOTH", "value": "$(P_k)/$(SECRET)"},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        ],
    }
    result = await container_environment(POD, container, {}, ADDRESSES, {"cpu": "8"}, lookup)
    assert result == {"P_k": "v", "SECRET": "hi", "BOTH": "v/hi", "CPU": "8"}
    container["env"] = [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "no"}}}]
    with pytest.raises(ConfigError, match="couldn't find key no in ConfigMap ns/c"):
        await container_environment(POD, container, {}, ADDRESSES, {}, lookup)


def test_a_container_without_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="images are ignored"):
        command_line({"name": "main", "args": ["x"]}, {})


def test_downward_fields() -> None:
    assert field_value("metadata.labels['b']", POD, ADDRESSES) == "2"
    assert field_value("metadata.labels", POD, ADDRESSES) == 'a="1\\""\nb="2"'
    assert field_value("status.podIP", POD, ADDRESSES) == "127.77.0.2"
    with pytest.raises(ConfigError, match="unsupported"):
        field_value("spec.nothing", POD, ADDRESSES)


def test_quantities() -> None:
    assert in_units_of("1500m", "1") == "2"
    assert in_units_of("2Gi", "1Mi") == "2048"
    assert parse_quantity("1e3") == 1000
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity("ten")


def test_a_probe_verdict_needs_its_threshold_in_a_row() -> None:
    verdict = ProbeVerdict(ProbeTiming(success_threshold=2, failure_threshold=3))
    seen = [
        verdict.observe(result) for result in (True, True, False, False, True, False, False, False)
    ]
    assert seen == [None, True, None, None, None, None, None, False]


def test_a_token_volume_is_added_only_where_it_is_missing() -> None:
    account = {"metadata": {"name": "default"}}
    added = with_service_account_token(POD, account)
    assert added["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == TOKEN_PATH
    assert with_service_account_token(added, account) == added
    assert (
        with_service_account_token(POD, {**account, "automountServiceAccountToken": False}) is POD
    )
    assert with_service_account_token(POD, None) is POD


async def test_mounts_that_nest_or_climb_are_refused(tmp_path: Path) -> None:
    async def lookup(kind: str, namespace: str, name: str) -> None:
        return None

    volumes = PodVolumes({**POD}, tmp_path, None, b"", lookup, ADDRESSES, {})  # type: ignore[arg-type]
    nested = [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/a/b"}]
    with pytest.raises(MountError, match="lies inside mountPath /a"):
        volumes.mount({"name": "main", "volumeMounts": nested})
    with pytest.raises(MountError, match="must stay inside"):
        volumes.mount(
            {"name": "main", "volumeMounts": [{"name": "a", "mountPath": "/a", "subPath": "../x"}]}
        )


async def test_a_secret_may_be_mounted_inside_a_config_map_and_stays_when_that_changes(
    tmp_path: Path,
) -> None:
    config = {"old.json": "{}"}

    async def lookup(kind: str, namespace: str, name: str) -> dict[str, object]:
        return {"data": dict(config) if kind == "ConfigMap" else {"key": "c2VjcmV0"}}

    spec = {
        "volumes": [
            {"name": "c", "configMap": {"name": "c"}},
            {"name": "s", "secret": {"secretName": "s"}},
        ]
    }
    pod = {**POD, "spec": {**POD["spec"], **spec}}
    volumes = PodVolumes(pod, tmp_path, None, b"", lookup, ADDRESSES, {})  # type: ignore[arg-type]
    mounts = [{"name": "c", "mountPath": "/etc/x"}, {"name": "s", "mountPath": "/etc/x/s"}]
    await volumes.make()
    root = volumes.mount({"name": "main", "volumeMounts": mounts})
    config["new.json"] = config.pop("old.json")
    await volumes.make()
    assert sorted(path.name for path in (root / "etc/x").iterdir() if path.name[0] != ".") == [
        "new.json",
        "s",
    ]
    assert (root / "etc/x/s/key").read_text() == "secret"


async def test_an_object_that_cannot_be_read_is_an_error_of_the_configuration() -> None:
    """The container waits with CreateContainerConfigError, whether the API server refuses or is away."""

    class Failing:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def get(self, path: str) -> dict[str, object]:
            raise self.error

    for error in (KubeError(403, "Forbidden", "not allowed"), ConnectionError("refused")):
        with pytest.raises(ConfigError, match=f"configmaps ns/m: {error}"):
            await _lookup(Failing(error))("ConfigMap", "ns", "m")  # type: ignore[arg-type]
    assert await _lookup(Failing(KubeError(404, "NotFound", "")))("ConfigMap", "ns", "m") is None  # type: ignore[arg-type]


async def test_files_are_written_although_a_kubelet_was_killed_while_switching(
    tmp_path: Path,
) -> None:
    async def lookup(kind: str, namespace: str, name: str) -> dict[str, object]:
        return {"data": {"key": "value"}}

    volume = {"name": "v", "configMap": {"name": "m"}}
    pod = {**POD, "spec": {**POD["spec"], "volumes": [volume]}}
    left = tmp_path / "volumes" / "v" / "..data_new"
    left.parent.mkdir(parents=True)
    left.symlink_to("..gone")
    await PodVolumes(pod, tmp_path, None, b"", lookup, ADDRESSES, {}).make()  # type: ignore[arg-type]
    assert (left.parent / "key").read_text() == "value"


async def read(path: Path, log: ContainerLog | None, **options: object) -> bytes:
    return b"".join([chunk async for chunk in stream_log(path, log, **options)])  # type: ignore[arg-type]


async def test_a_log_gives_back_what_was_written_and_stays_small(tmp_path: Path) -> None:
    log = ContainerLog(tmp_path / "0.log", max_bytes=2000)
    text = b"".join(b"line %03d\n" % n for n in range(100))
    for start in range(0, len(text), 7):  # pieces that respect no line
        log.feed("stdout", text[start : start + 7])
    log.feed("stdout", b"no newline")
    log.close()
    kept = await read(log.path, log)
    assert (text + b"no newline").endswith(kept)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4200
    assert await read(log.path, log, tail=2) == b"line 099\nno newline"
    assert await read(log.path, log, limit_bytes=5) == kept[:5]
    assert await read(log.path, log, since=datetime.now(UTC) + timedelta(hours=1)) == b""
    assert log.tail(max_bytes=10) == "no newline"


async def test_a_follower_sees_lines_across_a_rotation(tmp_path: Path) -> None:
    log = ContainerLog(tmp_path / "0.log", max_bytes=1000)
    log.feed("stdout", b"first\n")
    follower = asyncio.create_task(read(log.path, log, follow=True))
    expected = b"first\n"
    for n in range(60):
        line = b"line %d\n" % n
        log.feed("stdout", line)
        expected += line
        await asyncio.sleep(0.002)
    log.close()
    assert await asyncio.wait_for(follower, 60) == expected


async def test_following_a_log_ends_when_its_pod_is_removed(tmp_path: Path) -> None:
    log = ContainerLog(tmp_path / "0.log")
    log.feed("stdout", b"first\n")
    follower = asyncio.create_task(read(log.path, log, follow=True))
    await asyncio.sleep(0)
    log.path.unlink()
    log.close()
    assert await asyncio.wait_for(follower, 60) == b"first\n"


async def test_the_guardian_kills_what_escaped_its_session(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    await guard.start()
    log = ContainerLog(tmp_path / "0.log")
    mark = f"35{time.time_ns() % 10**9}"
    process = Process.start(
        ["sh", "-c", f"setsid sleep {mark} & sleep {mark}"],
        dict(os.environ),
        tmp_path,
        guard,
        "c1",
        log,
    )
    marker = f"BATON_KUBELET_ID={guard.kubelet_id}"
    deadline = time.monotonic() + 60
    while len(guardian.find_processes((), marker)) < 3:
        assert time.monotonic() < deadline, "the shell and both sleeps did not start"
        await asyncio.sleep(0.02)
    await guard.stop()
    assert guardian.find_processes((), marker) == []
    assert await process.wait(60) == 137
    await process.finish()


async def test_a_killed_guardian_is_replaced_by_one_that_knows_everything(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    await guard.start()
    log = ContainerLog(tmp_path / "0.log")
    # It clears its environment, so only its session gives it away.
    process = Process.start(
        ["env", "-i", "sleep", "1000"], dict(os.environ), tmp_path, guard, "c1", log
    )
    assert guard._process is not None
    first = guard._process.pid
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while guard._process.pid == first:
        assert time.monotonic() < deadline, "no new guardian"
        await asyncio.sleep(0.02)
    await guard.stop()
    assert await process.wait(60) == 137
    await process.finish()


def test_a_second_kubelet_is_refused_the_state_folder(tmp_path: Path) -> None:
    async def contend() -> None:
        first = Guard(tmp_path)
        await first.start()
        try:
            with pytest.raises(TimeoutError, match="another kubelet uses"):
                await Guard(tmp_path).start(lock_timeout_s=0.2)
        finally:
            await first.stop()

    asyncio.run(contend())


def test_a_component_ends_with_its_parent() -> None:
    child = "from baton_local.lifeline import die_with_parent; import time; die_with_parent(); "
    child += "print('up', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
    parent += "p.stdout.readline(); print(p.pid, flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, timeout=20, check=True
    )
    pid, deadline = int(done.stdout), time.monotonic() + 60
    while pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] and _state(
        pid
    ) not in ("Z", ""):
        assert time.monotonic() < deadline, f"process {pid} still alive"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
