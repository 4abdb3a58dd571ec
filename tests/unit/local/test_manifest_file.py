"""Manifests that users write: which files are refused, and with which reason."""

from __future__ import annotations

import pytest

from baton_local.manifest_file import load_documents

SERVICE = "apiVersion: serving.baton.dev/v1alpha1\nkind: LLMService\nmetadata: %s"


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
def test_an_invalid_manifest_is_refused_with_path_and_reason(tmp_path, text, complaint) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as error:
        load_documents(path)
    assert str(path) in str(error.value)
    with pytest.raises(ValueError, match="cannot read"):
        load_documents(tmp_path / "nowhere.yaml")


def test_a_binary_manifest_is_refused_with_its_path(tmp_path) -> None:
    path = tmp_path / "service.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=r"service\.yaml is not valid YAML"):
        load_documents(path)
