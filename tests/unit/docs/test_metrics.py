"""docs/reference/metrics.md names every metric that a component exposes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baton_engine.elastic.coordinator.coordinator_metrics import CoordinatorMetrics
from baton_gateway.metrics import GatewayMetrics
from baton_protocol.topology import TopologyStatus

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
NAME = re.compile(r"baton(:|_operator_)[a-z_0-9]+")
KINDS = ("counter", "gauge", "histogram", "summary", "info", "enum")


def documented() -> dict[str, str]:
    """Return the types of the metrics in the page's tables, by name without `_total`."""
    rows = re.findall(r"^\| `(baton[a-z_:0-9]+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    return {name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in rows}


def registered() -> Iterator[tuple[str, str]]:
    """Yield (name, place) of each metric that the components create."""
    for component in ("engine", "gateway", "kv_transfer", "operator"):
        for path in sorted((ROOT / component).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and node.args
                    and isinstance(node.args[0], ast.Constant)
                ):
                    called = ast.unparse(node.func).split(".")[-1]
                    name = node.args[0].value
                    if (
                        called.removesuffix("MetricFamily").lower() in KINDS
                        and isinstance(name, str)
                        and NAME.fullmatch(name)
                    ):
                        yield name, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_the_tables_are_generated_from_the_registries() -> None:
    command = [sys.executable, "hack/metrics_reference.py", str(PAGE), "--check"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_metric_is_documented() -> None:
    found = dict(registered())
    assert len(found) > 40
    missing = {name: where for name, where in found.items() if name not in documented()}
    assert missing == {}


def test_engines_and_gateways_register_different_names() -> None:
    sections = PAGE.read_text().split("\n## ")
    engine, gateway = (
        {
            name
            for section in sections
            if section.startswith(component)
            for name in re.findall(r"^\| `(baton[a-z_:0-9]+)` \|", section, re.MULTILINE)
        }
        for component in ("Engine", "Gateway")
    )
    assert len(engine) > 40
    assert len(gateway) > 10
    assert engine & gateway == set()


def test_documented_types_equal_those_of_a_scrape() -> None:
    scraped = [
        GatewayMetrics().text.get(),
        CoordinatorMetrics().text(
            TopologyStatus(generation=0, desired=[], members=[]), imbalance=1.0
        ),
    ]
    families = [
        family for text in scraped for family in text_string_to_metric_families(text.decode())
    ]
    assert len(families) > 20
    for family in families:
        if not family.name.endswith("_created"):
            assert documented()[family.name] == family.type


def test_the_dashboard_exists_at_the_documented_path() -> None:
    [link] = re.findall(r"\]\((\S+dashboard\.json)\)", PAGE.read_text())
    assert (PAGE.parent / link).resolve() == ROOT / "charts/baton/files/dashboard.json"
