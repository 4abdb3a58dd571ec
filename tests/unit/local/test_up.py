"""`baton up` before it starts a process: the spec and the model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from baton_local.state import StateDir
from baton_local.up import UpError, UpOptions, provide_model, run_up

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
    with pytest.raises(UpError, match=f"spec.model.uri is {uri}; set it to file:///models/demo"):
        await provide_model(model, {"spec": {"model": {"uri": uri}}}, state, Console())
    assert not state.host_root.exists()
