"""The usage that the kubelet measures for `kubectl top`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pocketkube.containers.usage import ResourceUsage
from pocketkube.kubelet import stats_summary


def worker(name: str, **container_ids: str) -> Any:
    states = {key: SimpleNamespace(container_id=value) for key, value in container_ids.items()}
    metadata = {"namespace": "ns", "name": name, "uid": f"uid-{name}"}
    return SimpleNamespace(pod={"metadata": metadata}, runtime=SimpleNamespace(main=states))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two measurements, 2 s apart: `a` is busy, `b` loses a process, `c` ends, `d` starts."""
    containers = iter(
        [
            {
                "a": ResourceUsage(10.0, 100),
                "b": ResourceUsage(5.0, 300),
                "c": ResourceUsage(1.0, 100),
            },
            {
                "a": ResourceUsage(11.0, 200),
                "b": ResourceUsage(4.0, 200),
                "d": ResourceUsage(1.0, 100),
            },
        ]
    )
    machine = iter([ResourceUsage(50.0, 1000), ResourceUsage(53.0, 2000)])
    clock = SimpleNamespace(monotonic=iter([100.0, 102.0]).__next__)
    monkeypatch.setattr(stats_summary, "container_usage", containers.__next__)
    monkeypatch.setattr(stats_summary, "machine_usage", machine.__next__)
    monkeypatch.setattr(stats_summary, "time", clock)
    monkeypatch.setattr(stats_summary, "WINDOW_S", 0.0)


@pytest.mark.usefixtures("measured")
async def test_the_usage_is_that_of_the_node_and_of_containers_that_ran_all_the_time() -> None:
    workers = [
        worker("p", main="a", side="b"),
        worker("ends", main="c"),
        worker("starts", main="d"),
    ]
    summary = await stats_summary.measure("n", workers)

    def usage(entry: dict[str, Any]) -> tuple[float, int]:
        return entry["cpu"]["usageNanoCores"] / 1e9, entry["memory"]["workingSetBytes"]

    assert (summary["node"]["nodeName"], *usage(summary["node"])) == ("n", 1.5, 2000)
    [pod] = summary["pods"]
    assert pod["podRef"] == {"namespace": "ns", "name": "p", "uid": "uid-p"}
    assert [(each["name"], *usage(each)) for each in pod["containers"]] == [
        ("main", 0.5, 200),
        ("side", 0.0, 200),
    ]
