"""JSON patches beyond the conformance tests (tests/e2e): the limit of copies."""

import pytest

from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.patches import MAX_COPIED_BYTES, json_patch


def test_copies_are_limited_in_size() -> None:
    doubling = [
        {"op": "copy", "from": "/metadata", "path": f"/metadata/annotations/x{i}"}
        for i in range(100)
    ]
    original = {"metadata": {"name": "a", "annotations": {}}}
    assert len(json_patch(original, doubling[:5])["metadata"]["annotations"]) == 5
    with pytest.raises(ApiError, match="copies too much") as caught:
        json_patch(original, doubling)
    assert caught.value.code == 413
    assert original == {"metadata": {"name": "a", "annotations": {}}}
    half = {"a": "b" * (MAX_COPIED_BYTES // 2)}
    copies = [{"op": "copy", "from": "/a", "path": f"/{name}"} for name in "bcd"]
    assert json_patch(half, copies[:1])["b"] == half["a"]
    with pytest.raises(ApiError, match="copies too much"):
        json_patch(half, copies)


def test_an_invalid_operation_is_refused_before_any_is_applied() -> None:
    operations = [{"op": "remove", "path": "/missing"}, {"op": "unknown", "path": "/a"}]
    with pytest.raises(ApiError) as caught:
        json_patch({"a": 1}, operations)
    assert caught.value.code == 400
