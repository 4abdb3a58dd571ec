"""Pods of a kubelet on a real kube-apiserver: life cycle, probes, volumes, logs, restarts."""

import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton_kube.client import Object
from pocketkube.control_plane.real import find_assets
from support.pocketkube.kubelet_cluster import ApiServer, KubeletProcess
from support.waiting import eventually

PODS = "/api/v1/namespaces/default/pods"
# Random, so that test runs on the same machine use different addresses.
POOLS = [f"127.{octet}.0.0/16" for octet in random.sample(range(100, 250), 2)]

assets = find_assets()
pytestmark = pytest.mark.skipif(
    assets is None, reason="no kube-apiserver here; `make control-plane` builds one"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    assert assets is not None
    server = ApiServer(assets, tmp_path_factory.mktemp("plane"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def kubelet(
    server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeletProcess]:
    kubelet = KubeletProcess(
        server, tmp_path_factory.mktemp("kubelet") / "state", "node-a", POOLS[0]
    )
    try:
        kubelet.start()
        yield kubelet
    finally:
        kubelet.stop()


def container(script: str, **more: Any) -> Object:
    return {"name": "main", "image": "none", "command": ["sh", "-c", script], **more}


def run_pod(kubelet: KubeletProcess, *containers: Object, **spec: Any) -> str:
    """Create a pod on the kubelet's node. Return its name."""
    name = f"pod-{uuid.uuid4().hex[:8]}"
    body = {
        "nodeName": kubelet.node,
        "terminationGracePeriodSeconds": 2,
        "containers": list(containers),
        **spec,
    }
    metadata = {"name": name, "labels": {"app": name}}
    kubelet.server.create(
        PODS, {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": body}
    )
    return name


def status(kubelet: KubeletProcess, name: str) -> Object:
    pod = kubelet.server.get(f"{PODS}/{name}")
    return dict(pod["status"]) if pod else {}


def condition(kubelet: KubeletProcess, name: str, kind: str = "Ready") -> Object:
    return next(
        (dict(c) for c in status(kubelet, name).get("conditions", []) if c["type"] == kind), {}
    )


def main_status(kubelet: KubeletProcess, name: str) -> Object:
    return next(iter(status(kubelet, name).get("containerStatuses") or []), {})


def is_ready(kubelet: KubeletProcess, name: str) -> bool:
    return condition(kubelet, name).get("status") == "True"


def logs(kubelet: KubeletProcess, name: str, *options: str) -> str:
    command = ["kubectl", "--kubeconfig", str(kubelet.server.kubeconfig), "logs", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def processes_with(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if text in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_pod_has_its_own_address_and_its_log_can_be_followed(kubelet: KubeletProcess) -> None:
    name = run_pod(
        kubelet,
        container("echo hello from $POD_IP; sleep 0.5; echo again; echo oops >&2"),
        restartPolicy="Never",
    )
    eventually(lambda: status(kubelet, name).get("phase") == "Succeeded", "phase Succeeded")
    assert status(kubelet, name)["podIP"].startswith(POOLS[0].removesuffix("0.0/16"))
    text = logs(kubelet, name, "-f")
    assert f"hello from {status(kubelet, name)['podIP']}\n" in text
    assert "again\n" in text
    assert "oops\n" in text
    assert logs(kubelet, name, "--tail=1").count("\n") == 1
    assert main_status(kubelet, name)["state"]["terminated"]["reason"] == "Completed"


def test_following_a_log_ends_with_the_container(kubelet: KubeletProcess, tmp_path: Path) -> None:
    script = (
        f"echo line 1; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; "
        "for i in 2 3; do echo line $i; sleep 0.3; done"
    )
    name = run_pod(kubelet, container(script), restartPolicy="Never")
    eventually(lambda: main_status(kubelet, name).get("state", {}).get("running"), "running")
    command = ["kubectl", "--kubeconfig", str(kubelet.server.kubeconfig), "logs", name, "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        lines = [following.stdout.readline()]
        (tmp_path / "go").touch()
        lines += following.stdout.readlines()
    assert lines == ["line 1\n", "line 2\n", "line 3\n"]


def test_volumes_appear_below_the_pod_root(kubelet: KubeletProcess, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("tensor")
    maps = "/api/v1/namespaces/default/configmaps"
    settings = f"settings-{uuid.uuid4().hex[:6]}"
    kubelet.server.create(maps, {"metadata": {"name": settings}, "data": {"a.json": "one"}})
    if kubelet.server.get("/api/v1/namespaces/default/serviceaccounts/default") is None:
        kubelet.server.create(
            "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}}
        )
    script = (
        "cd $POCKETKUBE_POD_ROOT; account=var/run/secrets/kubernetes.io/serviceaccount; "
        "cat etc/conf/a.json models/weights $account/namespace; echo; "
        "echo token $(wc -c < $account/token); echo $PLAIN $FROM_MAP $0 $1; "
        "echo x > scratch/file; "
        "while [ $(cat etc/conf/a.json) = one ]; do sleep 0.1; done; "
        "echo now $(cat etc/conf/a.json); sleep 100"
    )
    name = run_pod(
        kubelet,
        container(
            script,
            args=["$(PLAIN)-$(MISSING)", "$(FROM_MAP)"],
            env=[
                {"name": "PLAIN", "value": "1024"},
                {
                    "name": "FROM_MAP",
                    "valueFrom": {"configMapKeyRef": {"name": settings, "key": "a.json"}},
                },
            ],
            volumeMounts=[
                {"name": "conf", "mountPath": "/etc/conf"},
                {"name": "models", "mountPath": "/models"},
                {"name": "scratch", "mountPath": "/scratch"},
            ],
        ),
        serviceAccountName="default",
        volumes=[
            {"name": "conf", "configMap": {"name": settings}},
            {"name": "models", "hostPath": {"path": str(tmp_path), "type": "Directory"}},
            {"name": "scratch", "emptyDir": {}},
        ],
    )
    eventually(lambda: "1024 one" in logs(kubelet, name), "the script's output")
    text = logs(kubelet, name)
    assert "onetensordefault" in text
    assert "1024 one 1024-$(MISSING) one" in text
    assert int(text.split("token ")[1].split()[0]) > 100
    kubelet.server.patch(f"{maps}/{settings}", {"data": {"a.json": "two"}})
    eventually(lambda: "now two" in logs(kubelet, name), "the refreshed ConfigMap", 30)


def test_a_killed_container_restarts_and_reports_exit_code_and_log(kubelet: KubeletProcess) -> None:
    mark = f"31{uuid.uuid4().int % 10**8}"
    name = run_pod(
        kubelet,
        container(
            f"echo to the log; exec sleep {mark}", terminationMessagePolicy="FallbackToLogsOnError"
        ),
    )
    eventually(lambda: is_ready(kubelet, name), "Ready")
    eventually(lambda: "to the log" in logs(kubelet, name), "its output in the log")
    since = condition(kubelet, name)["lastTransitionTime"]
    (process,) = processes_with(mark)
    process.kill()
    eventually(
        lambda: main_status(kubelet, name).get("restartCount") == 1 and is_ready(kubelet, name),
        "one restart, Ready",
    )
    ended = main_status(kubelet, name)["lastState"]["terminated"]
    assert ended["exitCode"] == 137
    assert ended["message"] == "to the log\n"
    assert condition(kubelet, name)["lastTransitionTime"] >= since
    assert condition(kubelet, name, "Initialized")["status"] == "True"
    assert "to the log" in logs(kubelet, name, "--previous")


def test_a_crashing_container_backs_off(kubelet: KubeletProcess) -> None:
    name = run_pod(
        kubelet, container("echo why > $POCKETKUBE_POD_ROOT/dev/termination-log; exit 78")
    )

    def backs_off() -> Object:
        entry = main_status(kubelet, name)
        waiting = entry.get("state", {}).get("waiting", {})
        return (
            entry
            if waiting.get("reason") == "CrashLoopBackOff" and entry["restartCount"] >= 2
            else {}
        )

    entry = eventually(backs_off, "CrashLoopBackOff")
    assert entry["lastState"]["terminated"]["exitCode"] == 78
    assert entry["lastState"]["terminated"]["message"] == "why\n"
    assert "back-off" in entry["state"]["waiting"]["message"]


def test_a_missing_command_is_named_in_the_waiting_reason(kubelet: KubeletProcess) -> None:
    name = run_pod(kubelet, {"name": "main", "image": "none", "command": ["no-such-command"]})
    waiting = eventually(
        lambda: main_status(kubelet, name).get("state", {}).get("waiting", {}).get("message"),
        "a message",
    )
    assert "no-such-command" in waiting
    assert main_status(kubelet, name)["state"]["waiting"]["reason"] == "CreateContainerError"


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"configMap": {"name": "absent"}}, 'configmap "absent" not found'),
        ({"secret": {"secretName": "absent"}}, 'secret "absent" not found'),
    ],
)
def test_a_pod_waits_for_config_maps_and_secrets_of_its_volumes(
    kubelet: KubeletProcess, volume: Object, message: str
) -> None:
    name = run_pod(kubelet, container("sleep 100"), volumes=[{"name": "v", **volume}])

    def failed_mount() -> list[Object]:
        events = kubelet.server.get("/api/v1/namespaces/default/events") or {"items": []}
        return [
            e
            for e in events["items"]
            if e["involvedObject"]["name"] == name and e["reason"] == "FailedMount"
        ]

    event = eventually(failed_mount, "event FailedMount")[0]
    assert event["message"] == f'MountVolume.SetUp failed for volume "v" : {message}'
    assert status(kubelet, name)["phase"] == "Pending"
    assert main_status(kubelet, name)["state"]["waiting"]["reason"] == "ContainerCreating"
    assert "podIP" not in status(kubelet, name), (
        "the pod has an address before its volumes are mounted"
    )


def test_a_container_waits_for_secrets_of_its_environment(kubelet: KubeletProcess) -> None:
    secret = f"later-{uuid.uuid4().hex[:8]}"
    reference = {"secretKeyRef": {"name": secret, "key": "token"}}
    name = run_pod(kubelet, container("sleep 100", env=[{"name": "TOKEN", "valueFrom": reference}]))

    def waiting() -> Any:
        return main_status(kubelet, name).get("state", {}).get("waiting", {}).get("message")

    assert eventually(waiting, "a message") == f'secret "{secret}" not found'
    assert main_status(kubelet, name)["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    body = {
        "kind": "Secret",
        "apiVersion": "v1",
        "metadata": {"name": secret},
        "stringData": {"other": "x"},
    }
    kubelet.server.create("/api/v1/namespaces/default/secrets", body)
    text = f"couldn't find key token in Secret default/{secret}"
    eventually(lambda: waiting() == text, text)
    kubelet.server.patch(
        f"/api/v1/namespaces/default/secrets/{secret}", {"stringData": {"token": "x"}}
    )
    eventually(lambda: is_ready(kubelet, name), "the pod to run")


def test_probes_control_readiness_and_restarts(kubelet: KubeletProcess, tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    (tmp_path / "alive").touch()
    probe = {"periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 30}
    name = run_pod(
        kubelet,
        {
            "name": "main",
            "image": "none",
            "command": [
                sys.executable,
                "-m",
                "http.server",
                "8000",
                "--bind",
                "$(POD_IP)",
                "--directory",
                str(tmp_path),
            ],
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [{"name": "http", "containerPort": 8000}],
            "startupProbe": {
                "httpGet": {"path": "/alive", "port": 8000},
                "periodSeconds": 1,
                "failureThreshold": 60,
            },
            "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, **probe},
            "livenessProbe": {"httpGet": {"path": "alive", "port": 8000}, **probe},
        },
    )
    eventually(lambda: is_ready(kubelet, name), "Ready")
    (tmp_path / "ready").unlink()
    eventually(lambda: not is_ready(kubelet, name), "not Ready after the probe failed")
    assert main_status(kubelet, name)["restartCount"] == 0
    (tmp_path / "ready").touch()
    eventually(lambda: is_ready(kubelet, name), "Ready again")
    (tmp_path / "alive").unlink()
    eventually(
        lambda: main_status(kubelet, name).get("restartCount", 0) >= 1,
        "a restart after the liveness probe failed",
    )


def test_init_containers_run_first_in_order(kubelet: KubeletProcess) -> None:
    mounts = [{"name": "scratch", "mountPath": "/scratch"}]
    steps = [
        {
            **container(f"echo {n} >> $POCKETKUBE_POD_ROOT/scratch/steps", volumeMounts=mounts),
            "name": n,
        }
        for n in ("first", "second")
    ]
    name = run_pod(
        kubelet,
        container("cat $POCKETKUBE_POD_ROOT/scratch/steps", volumeMounts=mounts),
        initContainers=steps,
        volumes=[{"name": "scratch", "emptyDir": {}}],
        restartPolicy="Never",
    )
    eventually(lambda: status(kubelet, name).get("phase") == "Succeeded", "phase Succeeded")
    assert logs(kubelet, name, "-c", "main").splitlines() == ["first", "second"]


def test_a_deleted_pod_gets_sigterm_and_then_sigkill(
    kubelet: KubeletProcess, tmp_path: Path
) -> None:
    mark = f"32{uuid.uuid4().int % 10**8}"
    polite = run_pod(
        kubelet,
        container(
            f"trap 'echo term >> {tmp_path}/said; exit 0' TERM; echo up > {tmp_path}/up; "
            "while true; do sleep 0.1; done",
        ),
    )
    # Ignores SIGTERM and has a child in another session.
    stubborn = run_pod(
        kubelet,
        container(f"trap '' TERM; setsid sleep {mark} & echo up > {tmp_path}/up2; sleep {mark}"),
    )
    eventually(lambda: (tmp_path / "up").exists() and (tmp_path / "up2").exists(), "both running")
    eventually(lambda: len(processes_with(f"sleep {mark}")) >= 2, "the stubborn processes")
    for name in (polite, stubborn):
        kubelet.server.request("DELETE", f"{PODS}/{name}")
    eventually(lambda: not status(kubelet, polite), "the polite pod gone")
    assert (tmp_path / "said").read_text().splitlines() == ["term"]
    eventually(lambda: not status(kubelet, stubborn), "the stubborn pod gone")
    assert not processes_with(mark)


def test_a_force_deleted_pod_gets_sigterm_and_soon_has_no_process(
    kubelet: KubeletProcess, tmp_path: Path
) -> None:
    mark = f"33{uuid.uuid4().int % 10**8}"
    trap = f"trap 'echo term > {tmp_path}/said' TERM"
    script = (
        f"{trap}; setsid sleep {mark} & echo up > {tmp_path}/up; while true; do sleep 0.1; done"
    )
    name = run_pod(kubelet, container(script), terminationGracePeriodSeconds=600)
    eventually(
        lambda: (tmp_path / "up").exists() and processes_with(f"sleep {mark}"), "its processes"
    )
    kubelet.server.request("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
    eventually(lambda: not processes_with(mark), "its processes gone")
    assert (tmp_path / "said").read_text() == "term\n"


def test_a_killed_kubelet_leaves_no_process_and_the_next_one_restarts_the_pods(
    server: ApiServer, tmp_path: Path
) -> None:
    mark = f"34{uuid.uuid4().int % 10**8}"
    kubelet = KubeletProcess(server, tmp_path / "state", "node-b", POOLS[1])
    kubelet.start()
    try:
        name = run_pod(kubelet, container(f"setsid sleep {mark} & sleep {mark}"))
        eventually(lambda: is_ready(kubelet, name), "Ready")
        eventually(lambda: len(processes_with(f"sleep {mark}")) >= 2, "its processes")
        before = main_status(kubelet, name)["containerID"]
        kubelet.kill()
        eventually(lambda: not processes_with(mark), "no process left after the kubelet", 5)
        kubelet.start()
        eventually(
            lambda: main_status(kubelet, name).get("restartCount") == 1, "the container restarted"
        )
        eventually(lambda: is_ready(kubelet, name), "Ready again")
        assert main_status(kubelet, name)["containerID"] != before
        assert main_status(kubelet, name)["lastState"]["terminated"]["exitCode"] == 137
        kubelet.stop()
        assert not processes_with(mark), "processes after a clean stop"
        assert not is_ready(kubelet, name), "a pod without its kubelet is not ready"
        assert status(kubelet, name)["phase"] == "Running"
        kubelet.start()
        eventually(
            lambda: main_status(kubelet, name).get("restartCount") == 2,
            "the container restarted once more",
        )
    finally:
        kubelet.stop()
