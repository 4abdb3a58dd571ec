"""The chart's CRD, for API servers with and without CEL rules."""

from __future__ import annotations

import shutil
from pathlib import Path

import helm_python as helm
import yaml

from baton_operator.api.crd import custom_resource_definition
from support.install.rendered_chart import CHART, NAMESPACE, RELEASE, one, render


def test_before_kubernetes_1_25_the_crd_has_no_rules(tmp_path: Path) -> None:
    template = CHART / "templates/crd.yaml"
    bound = 'semverCompare "<1.25-0"'
    assert bound in template.read_text()
    shutil.copytree(CHART, tmp_path / "baton")
    # The renderer assumes a new server. With this bound every version is an old one.
    old = tmp_path / "baton/templates/crd.yaml"
    old.write_text(template.read_text().replace(bound, 'semverCompare "<99-0"'))
    with helm.Chart.load(tmp_path / "baton") as chart:
        text = chart.render(None, name=RELEASE, namespace=NAMESPACE)["baton/templates/crd.yaml"]
    assert yaml.safe_load(text)["spec"] == custom_resource_definition(rules=False)["spec"]


def test_from_kubernetes_1_25_on_the_crd_has_rules() -> None:
    assert one(render(), "CustomResourceDefinition")["spec"] == custom_resource_definition()["spec"]
