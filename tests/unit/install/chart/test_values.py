"""values.schema.json rejects invalid values and covers every value."""

from __future__ import annotations

import json
from typing import Any

import helm_python as helm
import pytest
import yaml

from baton_kube.client import Object
from support.install.rendered_chart import CHART, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 1},
        {"replicas": 6},
        {"replicas": 0},
        {"image": {"name": "x"}},
        {"image": {"repository": ""}},
        {"image": {"tag": "a b"}},
        {"image": {"digest": "sha256:abc"}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"imagePullSecrets": ["registry"]},
        {"fullnameOverride": "Baton"},
        {"watchNamespaces": "team-a"},
        {"watchNamespaces": ["Team"]},
        {"watchNamespaces": ["a", "a"]},
        {"templates": "open"},
        {"hostPaths": ["models"]},
        {"hostPaths": ["/"]},
        {"hostPaths": ["/mnt/../etc"]},
        {"annotationPrefixes": [""]},
        {"logLevel": "trace"},
        {"logFormat": "xml"},
        {"resyncSeconds": 0},
        {"crds": {"install": "yes"}},
        {"crds": {"enabled": True}},
        {"rbac": {"clusterWide": True}},
        {"serviceAccount": {"create": False}},
        {"resources": {"limit": {}}},
        {"runAsUser": 0},
        {"podLabels": {"a": 1}},
        {"nodeSelector": ["a"]},
        {"tolerations": {"key": "a"}},
        {"affinity": {"nodeaffinity": {}}},
        {"podDisruptionBudget": {"enabled": True, "maxUnavailable": 0}},
        {"podDisruptionBudget": {"minAvailable": 1}},
        {"serviceMonitor": {"interval": "often"}},
        {"podMonitor": {"namespace": "x"}},
        {"dashboard": {"folder": "x"}},
        {"networkPolicy": {"apiServerPorts": []}},
        {"networkPolicy": {"apiServerCIDRs": ["api.example"]}},
    ],
    ids=json.dumps,
)
def test_the_schema_refuses_invalid_values(values: Object) -> None:
    (option,) = values
    with pytest.raises(helm.HelmError, match=option):
        render(values)


def test_a_parent_chart_may_pass_its_globals() -> None:
    assert render({"global": {"imageRegistry": "x"}}) == render()


def paths(node: Any, schema: Object, at: str = "") -> list[tuple[str, bool]]:
    """Yield the path of every value, and whether the schema names it and closes its object."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if not isinstance(node, dict) or "properties" not in schema:
        return []
    found = []
    for name, value in node.items():
        below = schema["properties"].get(name)
        found.append(
            (f"{at}.{name}", below is not None and schema.get("additionalProperties") is False)
        )
        found += paths(value, below or {}, f"{at}.{name}")
    return found


def test_the_schema_names_exactly_the_values() -> None:
    known = paths(VALUES, SCHEMA)
    assert [path for path, is_known in known if not is_known] == []
    assert set(SCHEMA["properties"]) == set(VALUES) | {"global"}
    for name, schema in SCHEMA["properties"].items():
        if "properties" in schema and name not in ("resources", "affinity"):
            assert set(schema["properties"]) == set(VALUES[name]), name
