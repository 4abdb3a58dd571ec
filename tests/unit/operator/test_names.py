"""The services to which a changed object belongs."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator import names
from baton_operator.names import Key, keys_of


def metadata(
    labels: dict[str, str] | None = None, references: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "namespace": "ns",
        "name": "o",
        "labels": labels or {},
        "ownerReferences": references or [],
    }


def test_an_object_belongs_to_the_service_of_its_label_and_to_its_controller() -> None:
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": "demo", "uid": "u"}
    others = [{**owner, "name": f"s{number}"} for number in range(1000)]
    assert list(keys_of("Pod", metadata(references=[*others, {**owner, "controller": True}]))) == [
        Key("ns", "demo")
    ]
    assert set(keys_of("Pod", metadata({names.LABEL_SERVICE: "a"}, others))) == {Key("ns", "a")}
    foreign = {**owner, "apiVersion": "other.dev/v1", "controller": True}
    assert list(keys_of("Pod", metadata(references=[foreign]))) == []


def test_an_object_without_labels_and_owners_belongs_to_no_service() -> None:
    assert list(keys_of("Pod", {"namespace": "ns", "name": "o"})) == []


@pytest.mark.parametrize("name", ["..", "../../victim/llmservices/s", ".?17", "a/b"])
def test_a_label_that_is_no_name_of_a_service_is_ignored(name: str) -> None:
    assert list(keys_of("Pod", metadata({names.LABEL_SERVICE: name}))) == []
