"""kubectl and the Python client run commands in pods of a pocketkube and forward their ports."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import psutil
import pytest
from kubernetes.stream import portforward, stream

from support.service.local_cluster import require_control_plane
from support.waiting import eventually

SETTINGS = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "settings"},
    "data": {"colour": "green"},
}
WEB = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "web", "labels": {"app": "web"}},
    "spec": {
        "containers": [
            {
                "name": "server",
                "image": "none",
                "command": ["python", "-m", "http.server", "8000", "--bind", "$(POD_IP)"],
                "workingDir": "/files",
                "env": [{"name": "SIZE", "value": "large"}],
                "ports": [{"name": "http", "containerPort": 8000}],
                "readinessProbe": {"httpGet": {"port": 8000}, "periodSeconds": 1},
                "volumeMounts": [
                    {"name": "files", "mountPath": "/files"},
                    {"name": "settings", "mountPath": "/etc/settings"},
                ],
            },
            {"name": "idle", "image": "none", "command": ["sleep", "3600"]},
        ],
        "terminationGracePeriodSeconds": 1,
        "volumes": [
            {"name": "files", "emptyDir": {}},
            {"name": "settings", "configMap": {"name": "settings"}},
        ],
    },
}
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]},
}


class Cluster:
    """A running pocketkube with the pod `web`."""

    def __init__(self, kubeconfig: Path, control_plane: str) -> None:
        self.kubeconfig = kubeconfig
        self.control_plane = control_plane

    def command(self, *arguments: str) -> list[str]:
        return ["kubectl", "--kubeconfig", str(self.kubeconfig), *arguments]

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def forwarding(self, target: str, port: int) -> Iterator[str]:
        """Forward a free local port to `port` during the block. Yield the URL."""
        command = self.command("port-forward", target, f":{port}")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                line = process.stdout.readline()
                match = re.match(r"Forwarding from (127\.0\.0\.1:\d+) ", line)
                assert match, line + process.stdout.read()
                yield f"http://{match[1]}"
            finally:
                process.terminate()


@pytest.fixture(scope="module", params=["embedded", "real"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    require_control_plane(request.param)
    command = [sys.executable, "-m", "pocketkube", "--control-plane", request.param]
    folder = tmp_path_factory.mktemp("pocketkube")
    with subprocess.Popen(
        [*command, "--state-dir", str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            cluster = Cluster(Path(process.stdout.readline().strip()), request.param)
            objects = {"apiVersion": "v1", "kind": "List", "items": [SETTINGS, SERVICE, WEB]}
            trial = ("create", "--dry-run=server", "-f", "-")
            # Until admission has seen the default account and its secret, it refuses each pod.
            eventually(
                lambda: cluster.run(*trial, stdin=json.dumps(WEB)).returncode == 0,
                "a pod of the default service account is admitted",
            )
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(objects))
            cluster.kubectl("wait", "pod/web", "--for=condition=Ready", "--timeout=50s")
            yield cluster
        finally:
            process.terminate()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as response:
        return str(response.read().decode())


def test_exec_runs_a_command_in_the_environment_of_the_container(cluster: Cluster) -> None:
    script = "echo $SIZE; cat $POCKETKUBE_POD_ROOT/etc/settings/colour; pwd >&2; exit 7"
    done = cluster.run("exec", "web", "-c", "server", "--", "sh", "-c", script)
    assert done.returncode == 7
    assert done.stdout == "large\ngreen"
    folder, message = done.stderr.splitlines()
    assert folder.endswith("/files")
    assert message == "command terminated with exit code 7"


def test_exec_passes_standard_input_and_its_end(cluster: Cluster) -> None:
    text = "".join(f"line {number}\n" for number in range(50_000))
    assert cluster.kubectl("exec", "-i", "web", "-c", "idle", "--", "cat", stdin=text) == text


def test_a_command_that_reads_no_input_ends_with_its_client(cluster: Cluster) -> None:
    script = "sleep 600 & echo $$ $!; wait"
    command = cluster.command("exec", "-i", "web", "-c", "idle", "--", "sh", "-c", script)
    with (
        open("/dev/zero", "rb") as zeros,
        subprocess.Popen(command, stdin=zeros, stdout=subprocess.PIPE, text=True) as process,
    ):
        pids = [int(pid) for pid in process.stdout.readline().split()]
        commands = [psutil.Process(pid) for pid in pids]
        kubectl, seen = psutil.Process(process.pid), -1

        def is_stalled() -> bool:
            nonlocal seen
            before, seen = seen, kubectl.io_counters().read_chars
            return before == seen

        eventually(is_stalled, "kubectl can send no more input", every_s=0.5)
        process.kill()
    eventually(lambda: not any(c.is_running() for c in commands), "the command has ended")


def test_exec_refuses_unknown_containers_and_commands(cluster: Cluster) -> None:
    done = cluster.run("exec", "web", "-c", "other", "--", "true")
    assert (done.returncode, "other" in done.stderr) == (1, True)
    done = cluster.run("exec", "web", "-c", "idle", "--", "no-such-command")
    assert (done.returncode, "no-such-command" in done.stderr) == (1, True)


def test_exec_in_a_terminal_has_its_size(cluster: Cluster) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    command = cluster.command("exec", "-it", "web", "-c", "idle", "--", "sh")
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    ) as process:
        os.close(slave)
        shown = b""

        def has_size() -> bool:
            nonlocal shown
            # kubectl sends the size after it has started the shell.
            os.write(master, b"stty size\n")
            shown += os.read(master, 65536)
            return b"33 77" in shown

        eventually(has_size, "the size of the terminal", every_s=0.2)
        os.write(master, b"exit 9\n")
        with contextlib.suppress(OSError):  # the end of the terminal
            while os.read(master, 65536):
                pass
        assert process.wait(30) == 9
    os.close(master)


def test_top_shows_the_usage_of_the_node_and_its_containers(cluster: Cluster) -> None:
    if cluster.control_plane == "real":
        pytest.skip("the real control plane has no metrics-server")
    rows = [line.split() for line in cluster.kubectl("top", "pod", "--containers").splitlines()]
    assert rows[0] == ["POD", "NAME", "CPU(cores)", "MEMORY(bytes)"]
    memory = {name: int(size.removesuffix("Mi")) for _, name, _, size in rows[1:]}
    assert memory.keys() == {"server", "idle"}
    assert memory["server"] > memory["idle"], "Python needs more than sleep"

    def node() -> tuple[str, int, int]:
        _, line = cluster.kubectl("top", "node").splitlines()
        name, cores, _, size, _ = line.split()
        return name, int(cores.removesuffix("m")), int(size.removesuffix("Mi"))

    # A process that ends while the usage is measured takes its CPU time with it.
    eventually(lambda: node()[1] > 0, "the node uses CPU time")
    name, _, memory_mib = node()
    assert cluster.kubectl("get", "nodes", "-o", "name") == f"node/{name}\n"
    assert memory_mib > memory["server"]


def test_cp_copies_files_to_and_from_the_working_folder(cluster: Cluster, tmp_path: Path) -> None:
    sent, received = tmp_path / "sent", tmp_path / "received"
    sent.write_bytes(os.urandom(2**20))
    cluster.kubectl("cp", "-c", "server", str(sent), "web:copied")
    cluster.kubectl("cp", "-c", "server", "web:copied", str(received))
    assert received.read_bytes() == sent.read_bytes()


def test_attach_shows_the_output_of_the_container(cluster: Cluster) -> None:
    command = cluster.command("attach", "web", "-c", "server")
    with (
        cluster.forwarding("pod/web", 8000) as url,
        subprocess.Popen(command, stdout=subprocess.PIPE) as attached,
    ):
        os.set_blocking(attached.stdout.fileno(), False)

        def request_is_shown() -> bool:
            with contextlib.suppress(urllib.error.HTTPError):  # 404
                get(f"{url}/marker")
            return b"GET /marker" in (attached.stdout.read() or b"")

        eventually(request_is_shown, "the log line of a request", every_s=0.2)
        attached.terminate()


@pytest.mark.parametrize(("target", "port"), [("pod/web", 8000), ("service/web", 80)])
def test_port_forward_reaches_the_port_of_the_pod(cluster: Cluster, target: str, port: int) -> None:
    cluster.kubectl("exec", "web", "-c", "server", "--", "sh", "-c", "seq 200000 > numbers")
    with cluster.forwarding(target, port) as url:
        numbers = "".join(f"{number}\n" for number in range(1, 200_001))
        assert [get(f"{url}/numbers") for _ in range(3)] == [numbers] * 3


def test_port_forward_reports_a_closed_port(cluster: Cluster) -> None:
    with cluster.forwarding("pod/web", 8001) as url, pytest.raises(OSError):  # noqa: PT011
        get(url)


@pytest.fixture
def core(cluster: Cluster) -> Iterator[Any]:
    client = kubernetes.config.new_client_from_config(str(cluster.kubeconfig))
    with client:
        yield kubernetes.client.CoreV1Api(client)


def test_the_python_client_runs_commands_and_forwards_ports(core: Any) -> None:
    running = stream(
        core.connect_get_namespaced_pod_exec,
        "web",
        "default",
        container="idle",
        command=["sh", "-c", "read line; echo got $line; exit 5"],
        stdin=True,
        stdout=True,
        stderr=True,
        _preload_content=False,
    )
    running.write_stdin("hello\n")
    running.run_forever(timeout=30)
    assert (running.read_stdout(), running.returncode) == ("got hello\n", 5)
    forwarding = portforward(
        core.connect_get_namespaced_pod_portforward, "web", "default", ports="8000"
    )
    connection = forwarding.socket(8000)
    connection.settimeout(20)
    connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
    received = b""
    while data := connection.recv(65536):
        received += data
    assert received.startswith(b"HTTP/1.0 200")
