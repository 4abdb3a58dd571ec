"""The API server and the operator accept every LLMService in the documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_operator import names
from baton_operator.api import llmservice
from baton_operator.api.crd import custom_resource_definition
from baton_operator.api.rules import violations
from pocketkube.apiserver.schema.structural import StructuralSchema
from support.install.rendered_chart import notes

ROOT = Path(__file__).parents[3]
SCHEMA = StructuralSchema(
    custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
)
FENCE = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODEL = {"uri": "file:///m"}


def examples() -> list[Any]:
    """Yield whole objects and parts of a spec, by document and line."""
    found = []
    for path in sorted(
        [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("charts/**/*.md")]
    ):
        for match in FENCE.finditer(path.read_text()):
            where = (
                f"{path.relative_to(ROOT)}:{path.read_text()[: match.start()].count(chr(10)) + 1}"
            )
            documents = [
                document for document in yaml.safe_load_all(match[1]) if isinstance(document, dict)
            ]
            found += [pytest.param(document, id=where) for document in documents]
    [example] = re.findall(r"<<EOF\n(.*?)\nEOF\n", notes(), re.DOTALL)
    found.append(pytest.param(yaml.safe_load(example), id="NOTES.txt"))
    for path in sorted(
        [*ROOT.glob("manifests/samples/*.yaml"), *ROOT.glob("charts/**/samples/*.yaml")]
    ):
        found += [
            pytest.param(document, id=str(path.relative_to(ROOT)))
            for document in yaml.safe_load_all(path.read_text())
        ]
    return found


def as_service(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the LLMService that `document` is or is a part of, or None."""
    if document.get("kind") == names.KIND:
        return document
    if "kind" in document:
        return None
    spec = document["spec"] if set(document) == {"spec"} else document
    if not set(spec) & set(SCHEMA.schema["properties"]["spec"]["properties"]):
        return None
    head = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": "part"}}
    return {**head, "spec": {"model": MODEL, **spec}}


@pytest.mark.parametrize("document", examples())
def test_an_example_is_accepted_without_pruning(document: dict[str, Any]) -> None:
    service = as_service(document)
    if service is None:
        pytest.skip("no LLMService")
    assert service["apiVersion"] == names.API_VERSION
    pruned, unknown = SCHEMA.prune(service)
    assert unknown == []
    stored = SCHEMA.default(pruned)
    assert SCHEMA.validate(stored, None) == []
    assert violations(llmservice.decode_spec(stored["spec"])) == []


def test_examples_are_found() -> None:
    whole = [example for example in examples() if as_service(example.values[0]) is not None]
    assert {"README.md", "NOTES.txt", "docs/reference/api.md"} <= {
        str(example.id).split(":")[0] for example in whole
    }
    assert sum(str(example.id).startswith("manifests/samples/") for example in whole) >= 6
