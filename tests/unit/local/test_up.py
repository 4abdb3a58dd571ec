"""`baton up` before it starts a process."""

from __future__ import annotations

import pytest
from rich.console import Console

from baton_local.state import StateDir
from baton_local.up import UpOptions, run_up

SERVICE = "apiVersion: serving.baton.dev/v1alpha1\nkind: LLMService\nmetadata: %s"


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
