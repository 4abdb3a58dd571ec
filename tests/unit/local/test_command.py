"""Parts of the `baton` command: the lock of the state folder, manifests and the first request."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from baton_local.ask import AskError, ask
from baton_local.cli import main
from baton_local.display import service_tables
from baton_local.service import (
    Condition,
    PodStatus,
    ServiceStatus,
    ask_kv_bytes,
    format_kv_bytes,
    kv_bytes_received,
    load_documents,
    with_pids,
)
from baton_local.state import ClusterInfo, ClusterRunningError, StateDir, StateDirError
from baton_local.up import UpError, UpOptions, provide_model, run_up
from pocketkube.containers.process import CONTAINER_MARKER
from support.http_server import serving
from support.waiting import eventually

SERVICE = "apiVersion: serving.baton.dev/v1alpha1\nkind: LLMService\nmetadata: %s"

HOLDER = """
import sys, time
from pathlib import Path
from baton_local.state import StateDir
state = StateDir(Path(sys.argv[1])); state.acquire(); print("held", flush=True); time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def info(pid: int) -> ClusterInfo:
    return ClusterInfo(pid, "/k", "default", "demo", "/f")


def test_a_second_supervisor_is_refused_while_the_first_one_runs(holder, tmp_path):
    state = StateDir(tmp_path)
    assert state.supervisor() == holder.pid
    with pytest.raises(ClusterRunningError, match="baton down"):
        state.acquire()
    holder.send_signal(signal.SIGKILL)
    eventually(
        lambda: state.supervisor() is None,
        timeout_s=60,
        what="the lock of a killed supervisor free",
    )
    state.acquire()


def test_a_process_that_looks_up_the_supervisor_is_not_mistaken_for_it(holder, tmp_path):
    state = StateDir(tmp_path)
    holder.kill()
    holder.wait()
    with open(tmp_path / "lock") as lock:  # it still contains the pid of the dead supervisor
        fcntl.flock(lock, fcntl.LOCK_SH)  # another process looks up the supervisor
        assert state.supervisor() is None


def test_the_info_of_a_dead_supervisor_is_ignored(holder, tmp_path):
    state = StateDir(tmp_path)
    state.write_info(info(holder.pid))
    assert state.read_info() == info(holder.pid)
    holder.kill()
    eventually(
        lambda: state.read_info() is None, timeout_s=60, what="the info of a killed supervisor gone"
    )


def test_stop_ends_the_supervisor_and_returns_whether_one_ran(holder, tmp_path):
    state = StateDir(tmp_path)
    assert state.stop_supervisor(10)
    assert not state.stop_supervisor(10)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "not valid YAML"),
        ("\x07", "not valid YAML"),
        ("kind: LLMService", "apiVersion"),
        ("- 1", "apiVersion"),
        (SERVICE % "[]", r"metadata must be an object with a name, got \[\]"),
        (SERVICE % "{labels: {a: b}}", "metadata must be an object with a name"),
        (SERVICE % "{name: 3}", "metadata.name must be a string, got 3"),
        (SERVICE % "{name: x, namespace: null}", "metadata.namespace must be a string, got None"),
        (SERVICE % "{name: x, annotations: y}", "metadata.annotations must be an object, got 'y'"),
        (SERVICE % "&m {name: x, labels: *m}", "refers to itself"),
        (SERVICE % "{name: x}" + f"\nspec: {'[' * 2000}{']' * 2000}", "nested too deeply"),
        (SERVICE % "{name: x, labels: {day: 2026-01-01}}", "date .*quotes"),
        (SERVICE % "{name: x, labels: {a: .nan}}", "not JSON"),
        (SERVICE.replace("LLMService", "[]") % "{name: x}", r"kind must be a string, got \[\]"),
    ],
)
def test_an_invalid_manifest_is_refused_with_path_and_reason(tmp_path, text, complaint):
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as error:
        load_documents(path)
    assert str(path) in str(error.value)
    with pytest.raises(ValueError, match="cannot read"):
        load_documents(tmp_path / "nowhere.yaml")


def test_a_binary_manifest_is_refused_with_its_path(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=r"service\.yaml is not valid YAML"):
        load_documents(path)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("spec: 3", "spec must be an object, got 3"),
        ("spec:", "spec must be an object, got None"),
        ("spec: {model: /models/demo}", "spec.model must be an object, got '/models/demo'"),
    ],
)
def test_up_refuses_an_invalid_spec_before_it_starts_a_process(tmp_path, capsys, spec, complaint):
    path = tmp_path / "service.yaml"
    path.write_text(f"{SERVICE % '{name: x}'}\n{spec}\n")
    options = UpOptions(
        path, None, once=True, control_plane="embedded", ingress_port=0, timeout_s=1.0, max_tokens=1
    )
    state = StateDir(tmp_path / "home")
    assert run_up(options, state, Console(width=1000)) == 1
    assert capsys.readouterr().out == f"baton up: {path}: {complaint}\n"
    assert not state.root.exists()


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


async def test_up_links_the_model_at_the_path_of_the_uri_and_removes_earlier_links(tmp_path):
    state = StateDir(tmp_path / "home")
    demo, other = model_folder(state.models / "demo"), model_folder(tmp_path / "other")
    links = {
        "file:///models/demo": (None, demo),
        "file:///models/a/b/": (other, other),
        "hf://owner/model": (None, None),
    }
    for uri, (model, linked) in links.items():
        service = {"spec": {"model": {"uri": uri}}}
        await provide_model(model, service, state, Console())
        assert service == {"spec": {"model": {"uri": uri}}}
        found = [path for path in state.host_root.rglob("*") if path.is_symlink()]
        assert found == ([state.host_root / uri.removeprefix("file:///")] if linked else [])
        assert [path.readlink() for path in found] == [linked] * len(found)


@pytest.mark.parametrize("uri", ["hf://owner/model", "file:///../../etc", "file:///", None])
async def test_up_refuses_a_model_if_the_uri_names_no_folder(tmp_path, uri):
    state = StateDir(tmp_path / "home")
    model = model_folder(tmp_path / "other")
    with pytest.raises(UpError, match=f"spec.model.uri is {uri}; write file:///models/demo"):
        await provide_model(model, {"spec": {"model": {"uri": uri}}}, state, Console())
    assert not state.host_root.exists()


@pytest.mark.parametrize(
    "command", ["status", "down", "logs", "up -f service.yaml", "up --detach -f service.yaml"]
)
def test_a_state_folder_that_is_a_file_is_refused(tmp_path, monkeypatch, capsys, command):
    home = tmp_path / "file"
    home.touch()
    (tmp_path / "service.yaml").write_text(f"{SERVICE % '{name: x}'}\nspec: {{}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["baton", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    output = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().out
    assert (
        f"cannot keep a local cluster in {home}: Not a directory; set BATON_HOME to another folder"
        in output
    )
    assert ended.value.code != 0


def test_a_state_folder_that_cannot_be_created_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("BATON_HOME", "/proc/self/nowhere")
    monkeypatch.setattr(sys, "argv", ["baton", "up", "--detach", "-f", "service.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert "cannot keep a local cluster in /proc/self/nowhere: " in str(ended.value.code)


def test_info_of_another_version_is_an_error_only_if_its_supervisor_runs(holder, tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps({"supervisor_pid": holder.pid}))
    with pytest.raises(StateDirError, match="another version of baton"):
        StateDir(tmp_path).read_info()
    (tmp_path / "cluster.json").write_text(json.dumps({"supervisor_pid": holder.pid + 1}))
    assert StateDir(tmp_path).read_info() is None, "the info is of a killed supervisor"


def stream(*events: object) -> web.RouteDef:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return web.post("/v1/chat/completions", handler)


def chunk(text: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


async def test_a_response_is_printed_while_it_is_streamed_and_measured():
    route = stream(chunk("He"), chunk("llo"), {"choices": [], "usage": {"completion_tokens": 2}})
    printed: list[str] = []
    async with serving(route) as port:
        url = f"http://127.0.0.1:{port}"
        answer = await ask(url, "m", "hi", max_tokens=2, on_text=printed.append, timeout_s=10)
    assert printed == ["He", "llo"]
    assert (answer.text, answer.tokens) == ("Hello", 2)
    assert answer.ttft_s > 0


@pytest.mark.parametrize(
    ("route", "complaint"),
    [
        (stream(chunk("half")), "incomplete"),
        (stream(chunk("half"), {"error": {"message": "engine died"}}), "engine died"),
    ],
)
async def test_an_incomplete_stream_is_an_error(route, complaint):
    async with serving(route) as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(AskError, match=complaint):
            await ask(url, "m", "hi", max_tokens=2, on_text=lambda _: None, timeout_s=10)


async def test_a_refused_connection_is_an_error_with_the_address():
    with pytest.raises(AskError, match=r"http://127\.0\.0\.1:9"):
        await ask(
            "http://127.0.0.1:9", "m", "hi", max_tokens=2, on_text=lambda _: None, timeout_s=10
        )


def test_tables_print_brackets_literally_and_do_not_truncate_names():
    name, message = "demo-gateway-" + "x" * 40, "unready: [engine] see [/var/log]"
    pods = [PodStatus(name, "gateway", "127.77.0.2", "Running", False, 1, message)]
    conditions = [Condition("Ready", "False", "PodsNotReady", message)]
    status = ServiceStatus("demo", "default", "", "demo", conditions, pods, "", "/k")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(service_tables(status))
    assert console.export_text().count(message) == 2
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(service_tables(status))
    assert "…" not in console.export_text()


def test_status_shows_the_pid_of_a_pods_container():
    sleeper = ["sleep", "60"]
    process = subprocess.Popen(
        sleeper, env={**os.environ, CONTAINER_MARKER: "process://a1"}, start_new_session=True
    )
    try:
        pods = [
            PodStatus(
                "demo-decode-0",
                "decode",
                "127.77.0.2",
                "Running",
                True,
                0,
                "",
                container_id="process://a1",
            ),
            PodStatus("demo-decode-1", "decode", "", "Pending", False, 0, ""),
        ]
        status = ServiceStatus("demo", "default", "", "demo", [], pods, "", "/k")
        found = eventually(
            lambda: [pod.pid for pod in with_pids(status).pods if pod.pid],
            timeout_s=30,
            what="the container's process",
        )
        assert found == [process.pid]
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(service_tables(with_pids(status)))
        assert str(process.pid) in console.export_text()
    finally:
        process.kill()
        process.wait()


async def test_kv_bytes_are_read_from_engines_that_respond(monkeypatch):
    async def health(request: web.Request) -> web.Response:
        return web.json_response(
            {"reason": "Serving", "message": "", "kv_bytes": {"ucx tcp/lo": 3 * 2**19}}
        )

    pods = [
        PodStatus("demo-prefill-0", "prefill", "127.0.0.1", "Running", True, 0, ""),
        PodStatus("demo-decode-0", "decode", "127.0.0.1", "Running", True, 0, ""),
        PodStatus("demo-decode-1", "decode", "127.0.0.2", "Running", True, 0, ""),
        PodStatus("demo-gateway-0", "gateway", "127.0.0.1", "Running", True, 0, ""),
    ]
    async with serving(web.get("/health", health)) as port:
        monkeypatch.setattr("baton_local.service.ENGINE_HTTP_PORT", port)
        found = await ask_kv_bytes(ServiceStatus("demo", "default", "", "demo", [], pods, "", "/k"))
    assert [bool(pod.kv_bytes) for pod in found.pods] == [True, True, False, False]
    received = kv_bytes_received(found.pods)
    assert received == {"ucx tcp/lo": 3 * 2**19}, "only bytes of decode pods count"
    assert (
        format_kv_bytes(received | {"tcp sockets": 2**20})
        == "1.00 MiB over tcp sockets, 1.50 MiB over ucx tcp/lo"
    )


@pytest.mark.parametrize("output", ["json", "table"])
def test_status_of_a_deleted_service_names_the_kubeconfig(monkeypatch, capsys, output):
    async def deleted(info: ClusterInfo) -> None:
        return None

    monkeypatch.setattr("baton_local.cli._status", deleted)
    monkeypatch.setattr(StateDir, "read_info", lambda self: info(1))
    monkeypatch.setattr(sys, "argv", ["baton", "status", "-o", output])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "LLMService default/demo was deleted" in printed.err
    if output == "json":
        status = json.loads(printed.out)
        assert (status["service"], status["kubeconfig"], status["exists"], status["pods"]) == (
            "demo",
            "/k",
            False,
            [],
        )
    else:
        assert "kubeconfig  /k" in printed.out


def test_ctrl_c_during_a_detached_start_stops_the_supervisor(tmp_path):
    file = tmp_path / "demo.yaml"
    # A service that never becomes ready, so `up` still runs when the signal arrives.
    service = {
        "apiVersion": "serving.baton.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "demo"},
    }
    file.write_text(json.dumps(service | {"spec": {"model": {"uri": "file:///nowhere"}}}))
    state = StateDir(tmp_path / "home")
    command = [sys.executable, "-m", "baton_local.cli", "up", "--detach", "-f", str(file)]
    env = {**os.environ, "BATON_HOME": str(state.root)}
    up = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
    try:
        eventually(state.supervisor, timeout_s=60, what="a supervisor")
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 130
        assert state.supervisor() is None
    finally:
        up.kill()
        up.wait()
        state.stop_supervisor(20)


def test_serve_without_a_model_names_the_missing_argument():
    command = [sys.executable, "-m", "baton_local.cli", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("the following arguments are required: MODEL")
