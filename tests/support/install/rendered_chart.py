"""Render the chart with Helm's engine. For the tests of the chart and of the examples."""

from __future__ import annotations

from pathlib import Path

import helm_python as helm
import yaml

from baton_kube.client import Object

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/baton"
RELEASE = "baton"
NAMESPACE = "baton-system"


def render(values: Object | None = None, *, release: str = RELEASE) -> list[Object]:
    """Return all objects of the release.

    Raises:
        helm.HelmError: `helm template` would fail.
    """
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        manifests = chart.render(values, name=release, namespace=NAMESPACE)
    texts = [text for path, text in manifests.items() if not path.endswith("NOTES.txt")]
    return [obj for text in texts for obj in yaml.safe_load_all(text) if obj]


def notes(values: Object | None = None) -> str:
    with helm.Chart.load(CHART) as chart:
        return chart.render(values, name=RELEASE, namespace=NAMESPACE)["baton/templates/NOTES.txt"]


def one(objects: list[Object], kind: str) -> Object:
    (found,) = [obj for obj in objects if obj["kind"] == kind]
    return found


def kinds(objects: list[Object]) -> list[str]:
    return sorted(obj["kind"] for obj in objects)


def pod_spec(values: Object | None = None) -> Object:
    """Return the pod spec of the operator's Deployment in the rendered chart."""
    spec: Object = one(render(values), "Deployment")["spec"]["template"]["spec"]
    return spec
