"""The dashboard queries only metrics that the components expose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from baton_engine.elastic.coordinator.coordinator_metrics import CoordinatorMetrics
from baton_engine.metrics.engine_stats import EngineStats
from baton_engine.metrics.prometheus import engine_registry
from baton_engine.metrics.request_metrics import RequestMetrics
from baton_engine.metrics.topology_stats import TopologyStats, commit_pauses
from baton_gateway.metrics import GatewayMetrics
from baton_kv_transfer.connector import ConnectorStats
from baton_operator.process.operator_metrics import Metrics
from baton_protocol.topology import RankPhase, TopologyStatus
from support.install.rendered_chart import CHART, one, render

DASHBOARD = json.loads((CHART / "files/dashboard.json").read_text())


def exposed(families: Iterable[object]) -> set[str]:
    """Return the names as Prometheus stores them."""
    found = set()
    for family in families:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(
            family.type, ("",)
        )
        found |= {family.name + suffix for suffix in suffixes}
    return found


def engine() -> CollectorRegistry:
    stats = EngineStats(
        kv_transfer=ConnectorStats(), topology=TopologyStats(phase=RankPhase.SERVING)
    )
    return engine_registry(lambda: stats, RequestMetrics(), "m", commit_pauses())


def coordinator() -> set[str]:
    text = (
        CoordinatorMetrics()
        .text(TopologyStatus(generation=0, desired=[], members=[]), imbalance=1.0)
        .decode()
    )
    return exposed(text_string_to_metric_families(text))


def panels() -> list[tuple[str, str]]:
    """Yield (title, expression)."""
    return [
        (panel["title"], target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets") or []
    ]


def component_of(expression: str) -> set[str]:
    """Return the components whose metrics an expression may query."""
    if match := re.search(r'component=~"([a-z|]+)"', expression):
        return set(match[1].split("|"))
    return {"operator"}


def test_every_panel_queries_metrics_of_the_component_that_it_selects() -> None:
    registries: dict[str, Collector] = {
        "gateway": GatewayMetrics().registry,
        "prefill": engine(),
        "decode": engine(),
        "operator": Metrics().registry,
    }
    known = {component: exposed(registry.collect()) for component, registry in registries.items()}
    known["coordinator"] = coordinator()
    assert len(panels()) > 20
    for title, expression in panels():
        asked = set(re.findall(r"baton[:_]\w+", expression))
        assert asked, title
        for component in component_of(expression):
            assert asked <= known[component], (
                f"{title}: no {component} exposes {asked - known[component]}"
            )


def test_labels_that_panels_group_by_exist() -> None:
    """`llmservice` and `component` come from the PodMonitor, `pod` and `le` from Prometheus."""
    monitor = one(render({"podMonitor": {"enabled": True}}), "PodMonitor")
    added = {"llmservice", "component"}
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        labels = {entry.get("targetLabel") for entry in endpoint["relabelings"]}
        assert labels - {None} == added
    metric_labels = {"status", "reason", "role", "phase", "kind", "outcome", "result"}
    for title, expression in panels():
        for labels in re.findall(r"by \(([\w, ]+)\)", expression):
            assert set(labels.split(", ")) <= added | {"pod", "le"} | metric_labels, title


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_config_map_contains_the_whole_dashboard() -> None:
    values = {"enabled": True, "labels": {"dash": "yes"}, "annotations": {"folder": "LLM"}}
    config_map = one(render({"dashboard": values}), "ConfigMap")
    assert json.loads(config_map["data"]["baton.json"]) == DASHBOARD
    assert config_map["metadata"]["labels"]["dash"] == "yes"
    assert config_map["metadata"]["annotations"] == {"folder": "LLM"}
