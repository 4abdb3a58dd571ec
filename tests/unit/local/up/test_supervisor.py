"""`baton up`: its checks before it starts a process, and its output while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from baton_kube.client import KubeError
from baton_local.service_status import PodStatus, ServiceCondition, ServiceStatus
from baton_local.state_dir import StateDir
from baton_local.up.supervisor import UpError, UpOptions, _printable, _Supervisor, run_up

SERVICE = "apiVersion: serving.baton.dev/v1alpha1\nkind: LLMService\nmetadata: %s"


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("spec: 3", "spec must be an object, got 3"),
        ("spec:", "spec must be an object, got None"),
        ("spec: {model: /models/demo}", "spec.model must be an object, got '/models/demo'"),
    ],
)
def test_up_refuses_an_invalid_spec_before_it_starts_a_process(
    tmp_path, capsys, spec, complaint
) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(f"{SERVICE % '{name: x}'}\n{spec}\n")
    options = UpOptions(
        path, None, once=True, control_plane="embedded", ingress_port=0, timeout_s=1.0, max_tokens=1
    )
    state = StateDir(tmp_path / "home")
    assert run_up(options, state, Console(width=1000)) == 1
    assert capsys.readouterr().out == f"baton up: {path}: {complaint}\n"
    assert not state.root.exists()


class FakeApi:
    """An API server with a script of answers about the service. The last answer is repeated."""

    def __init__(self, *answers: ServiceStatus | KubeError) -> None:
        self.answers = list(answers)

    async def service(self, namespace: str, name: str) -> ServiceStatus:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, KubeError):
            raise answer
        return answer

    async def log(self, namespace: str, pod: str, **_: Any) -> AsyncIterator[bytes]:
        yield f"the log of {pod}\n".encode()


def make_up(tmp_path: Path) -> _Supervisor:
    file = tmp_path / "service.yaml"
    options = UpOptions(
        file, None, once=False, control_plane="embedded", ingress_port=0, timeout_s=600,
        max_tokens=1,
    )  # fmt: skip
    cluster: Any = SimpleNamespace(check=lambda: None, heal=list, logs=tmp_path / "logs")
    service = {"metadata": {"name": "demo"}}
    state = StateDir(tmp_path / "home")
    return _Supervisor(options, state, Console(width=1000), cluster, [service], service)


def status_with(reason: str, message: str = "", state: str = "False") -> ServiceStatus:
    pods = [PodStatus("demo-decode-0", "decode", "127.77.0.2", "Running", False, 1, "")]
    conditions = [ServiceCondition("Ready", state, reason, message)]
    return ServiceStatus("demo", "default", "http://x", "demo", conditions, pods, "", "/k")


@pytest.mark.parametrize("reason", ["ModelNotFound", "InvalidSpec"])
async def test_up_ends_at_once_after_a_failure_that_waiting_does_not_end(
    tmp_path, capsys, reason
) -> None:
    api: Any = FakeApi(status_with("Starting"), status_with(reason, "/models/x does not exist"))
    async with asyncio.timeout(60):  # the options allow 600 s
        with pytest.raises(UpError) as raised:
            await make_up(tmp_path)._wait_ready(api)
    assert f"cannot become Ready: {reason}: /models/x does not exist\n" in str(raised.value)
    assert f"Correct this in {tmp_path / 'service.yaml'}" in str(raised.value)
    assert "the log of demo-decode-0\n" in capsys.readouterr().out


async def test_up_waits_for_failures_that_may_end(tmp_path) -> None:
    ready = status_with("AllGroupsReady", state="True")
    api: Any = FakeApi(status_with("NoCapacity"), status_with("ReconcileError"), ready)
    assert await make_up(tmp_path)._wait_ready(api) is ready


async def test_up_reports_a_deleted_service_once_per_deletion(
    tmp_path, monkeypatch, capsys
) -> None:
    up, ready = make_up(tmp_path), status_with("AllGroupsReady", state="True")
    gone = KubeError(404, "NotFound", "gone")
    api: Any = FakeApi(ready, gone, gone, ready, gone, ready)

    async def sleep(_: float) -> None:
        if len(api.answers) == 1:
            up.stopped.set()

    monkeypatch.setattr("baton_local.up.supervisor.asyncio.sleep", sleep)
    await up._watch(api)
    assert capsys.readouterr().out.count("default/demo was deleted; `kubectl apply -f ") == 2


def test_the_text_of_a_model_cannot_command_the_terminal() -> None:
    assert _printable("a\x1b]52;c;aGk=\x07b\x9b2J\tc\n") == "a]52;c;aGk=b2J\tc\n"
