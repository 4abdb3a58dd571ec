"""The model of `baton up`: a link at the path of spec.model.uri."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_local.state_dir import StateDir
from baton_local.up.demo_model import DEMO_CHECKPOINT, ModelError, provide_model


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_up_links_the_model_at_the_path_of_the_uri_and_removes_earlier_links(
    tmp_path,
) -> None:
    state = StateDir(tmp_path / "home")
    other = model_folder(tmp_path / "other")
    links = {
        "file:///models/demo": (None, DEMO_CHECKPOINT),
        "file:///models/a/b/": (other, other),
        "hf://owner/model": (None, None),
    }
    for uri, (model, linked) in links.items():
        service = {"spec": {"model": {"uri": uri}}}
        provide_model(model, service, state)
        assert service == {"spec": {"model": {"uri": uri}}}
        found = [path for path in state.host_root.rglob("*") if path.is_symlink()]
        assert found == ([state.host_root / uri.removeprefix("file:///")] if linked else [])
        assert [path.readlink() for path in found] == [linked] * len(found)


@pytest.mark.parametrize("uri", ["hf://owner/model", "file:///../../etc", "file:///", None])
def test_up_refuses_a_model_if_the_uri_names_no_folder(tmp_path, uri) -> None:
    state = StateDir(tmp_path / "home")
    model = model_folder(tmp_path / "other")
    with pytest.raises(ModelError, match=f"spec.model.uri is {uri}; set it to file:///models/demo"):
        provide_model(model, {"spec": {"model": {"uri": uri}}}, state)
    assert not state.host_root.exists()
