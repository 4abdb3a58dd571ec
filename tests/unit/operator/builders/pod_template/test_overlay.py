"""The overlay of a user is merged into the pod template."""

from __future__ import annotations

import pytest

from baton_operator.builders.pod_template.overlay import merge


def test_objects_are_merged_by_field_and_a_null_removes_a_field() -> None:
    assert merge({"a": 1, "b": {"c": 2}}, {"a": None, "b": {"d": 3}}, "template") == {
        "b": {"c": 2, "d": 3}
    }


def test_lists_without_names_are_replaced() -> None:
    assert merge({"command": ["a", "b"]}, {"command": ["c"]}, "template") == {"command": ["c"]}


def test_volume_mounts_are_merged_by_path() -> None:
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/a"}]}
    more = {"volumeMounts": [{"name": "v", "mountPath": "/b"}]}
    assert len(merge(mounts, more, "template")["volumeMounts"]) == 2


def test_an_item_without_its_key_is_refused_with_the_field() -> None:
    with pytest.raises(ValueError, match=r"containers\[0\] must be an object with .name."):
        merge({"containers": [{"name": "a"}]}, {"containers": [{"image": "b"}]}, "template")


def test_two_changes_of_one_item_are_refused_with_its_name() -> None:
    base = {"containers": [{"name": "a"}]}
    for name, other in (("a", "b"), ("b", "a")):
        merge(base, {"containers": [{"name": name}, {"name": other}]}, "template")
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=rf'^template\.containers has two items .* "{name}"'):
            merge(base, {"containers": [{"name": name}, {"name": name}]}, "template")


def test_tolerations_are_appended_once() -> None:
    ours, theirs = {"key": "a"}, {"key": "b"}
    merged = merge({"tolerations": [ours]}, {"tolerations": [ours, theirs]}, "template.spec")
    assert merged == {"tolerations": [ours, theirs]}


def test_a_variable_with_a_reference_replaces_the_one_with_a_value() -> None:
    other, reference = {"name": "B", "value": "2"}, {"name": "A", "valueFrom": {}}
    base = {"env": [{"name": "A", "value": "1"}, other]}
    assert merge(base, {"env": [reference]}, "template") == {"env": [reference, other]}
