"""`benchmarks/report.py` writes results, and renders them as docs/reference/benchmarks.md."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
CHAR_WIDTH = 0.6 * 12  # an upper estimate for the mean of 12 px sans-serif


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("report")


@pytest.fixture
def in_folder(report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module with empty results and an empty folder for the page."""
    monkeypatch.setenv("BATON_MACHINE", "here")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "REFERENCE", tmp_path)
    return report


def row(part: str, value: float) -> dict[str, Any]:
    return {"part": part, "way": "Baton", "value": value}


def test_the_page_in_the_repository_is_the_one_that_the_results_give(
    report: ModuleType, tmp_path: Path
) -> None:
    report.render(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_text() == (ROOT / "docs" / "reference" / file.name).read_text()


def test_a_part_is_written_on_a_machine_without_a_result(in_folder: ModuleType) -> None:
    path = in_folder.replace("engine", [row("serving", 2.0)], [], repeats=5)
    result = json.loads(path.read_text())
    assert result["figures"] == [row("serving", 2.0)]
    assert result["runs"][0]["parts"] == ["serving"]


def test_a_replaced_part_leaves_the_figures_conditions_and_goals_of_the_others(
    in_folder: ModuleType, tmp_path: Path
) -> None:
    goal = in_folder.Goal
    in_folder.replace(
        "engine",
        [row("decode", 1.0), row("serving", 2.0)],
        [goal("of decode", 1.0, 1.0, "x"), goal("of serving", 2.0, 1.0, "x")],
        repeats=3,
    )
    path = in_folder.replace(
        "engine", [row("serving", 4.0)], [goal("of serving", 4.0, 1.0, "x")], repeats=5
    )
    result = json.loads(path.read_text())
    assert result["figures"] == [row("decode", 1.0), row("serving", 4.0)]
    assert [(run["parts"], run["repeats"]) for run in result["runs"]] == [
        (["decode"], 3),
        (["serving"], 5),
    ]
    assert {one["name"]: one["value"] for one in result["goals"]} == {
        "of decode": 1.0,
        "of serving": 4.0,
    }
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| 3 |" in page
    assert "| 5 |" in page


def test_a_ratio_is_the_median_of_the_ratios_of_paired_repeats(report: ModuleType) -> None:
    rates = {"Baton": [100.0, 200.0, 300.0], "OpenVINO": [50.0, 250.0, 200.0]}  # 2.0, 0.8, 1.5
    rows = [
        {"part": "tokens/s in int8", "way": way, "prefill": rate}
        for way, values in rates.items()
        for rate in values
    ]
    [comparison] = report.peer_ratios.comparisons(rows)
    assert comparison.rate == 200.0
    assert comparison.ratios == {"OpenVINO": 1.5}  # the medians' ratio is 1.0


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/reference/beside-peers-*.svg")))
def test_all_text_is_inside_of_the_picture(picture: Path) -> None:
    root = xml.etree.ElementTree.fromstring(picture.read_text())
    texts = root.findall("{http://www.w3.org/2000/svg}text")
    assert texts
    for text in texts:
        width = CHAR_WIDTH * len(text.text or "")
        anchor = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")]
        left = float(text.get("x", "")) - anchor * width
        assert left >= 0
        assert left + width <= float(root.get("width", "")), text.text
