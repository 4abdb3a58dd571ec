"""The selection of files to download: names inside the folder, and a limited number."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.fetch.fetch_errors import FetchError
from baton_engine.fetch.selection import MAX_FILES, select


@given(st.lists(st.text(max_size=20)))
def test_selected_files_stay_in_the_folder_for_any_names(names: list[str]) -> None:
    try:
        taken = select([*names, "config.json", "x.safetensors"], "all")
    except FetchError:
        return
    for name in taken:
        assert os.path.normpath(name) == name
        assert "/" not in name
        assert name.endswith((".json", ".safetensors", ".jinja", ".txt", ".model"))


def test_a_listing_of_very_many_files_is_refused() -> None:
    names = [f"{i}.safetensors" for i in range(MAX_FILES)]
    with pytest.raises(FetchError, match=f"{MAX_FILES + 1} files") as caught:
        select(["config.json", *names], "all")
    assert caught.value.reason == "ModelInvalid"


def test_hidden_files_are_not_downloaded() -> None:
    names = ["config.json", "x.safetensors", ".baton-partial.json", ".baton-model.json"]
    assert select(names, "all") == ["config.json", "x.safetensors"]
