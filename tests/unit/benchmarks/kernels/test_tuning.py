"""The tuner keeps the fastest correct candidate. Launches read it from the device's table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_kernels import launch_configurations
from baton_kernels.launch_configurations import (
    Configuration,
    configuration,
    overriding,
    read_table,
    table_file,
    write_table,
)

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
CPU = torch.device("cpu")
DEFAULT = {"tile": 16, "num_warps": 4}


class FakeKernel:
    """A kernel whose time depends on its tile. Tile 8 gives a wrong result, tile 512 fails."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds_of = seconds
        self.launched: list[int] = []

    def launch(self) -> int:
        config = configuration("fake", "large", CPU, DEFAULT)
        if config["tile"] == 512:
            raise RuntimeError("out of shared memory")
        self.launched.append(config["tile"])
        return config["tile"]

    def correct(self) -> bool:
        return self.launch() != 8

    def seconds(self) -> float:
        return self.seconds_of[self.launch()]


@pytest.fixture
def selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "kernels"))
    from tuning import selection

    yield selection
    for name in ("tuning.selection", "tuning"):
        sys.modules.pop(name)


def subject(selection, kernel: FakeKernel, candidates: list[Configuration]) -> Any:
    return selection.Subject(
        "fake",
        kernel.launch,
        kernel.correct,
        kernel.seconds,
        lambda operation, shape_class: candidates,
    )


def tiles(*sizes: int) -> list[Configuration]:
    return [{"tile": size} for size in sizes]


def test_the_fastest_correct_candidate_wins(selection) -> None:
    kernel = FakeKernel({16: 1.0, 8: 0.1, 32: 0.7, 64: 0.6, 128: 0.8})
    (choice,) = selection.choose(
        subject(selection, kernel, tiles(8, 32, 64, 128, 512)), deadline=float("inf")
    )
    assert (choice.operation, choice.shape_class) == ("fake", "large")
    assert choice.config == {"tile": 64, "num_warps": 4}
    assert (choice.seconds, choice.default_seconds) == (0.6, 1.0)
    assert choice.wrong == [{"tile": 8}]
    assert choice.num_failed == 1


def test_a_candidate_within_the_noise_does_not_replace_the_default(selection) -> None:
    kernel = FakeKernel({16: 1.0, 32: 0.99})
    (choice,) = selection.choose(subject(selection, kernel, tiles(32)), deadline=float("inf"))
    assert choice.config is None
    assert choice.seconds == 1.0


def test_candidates_of_another_kernel_of_the_operation_are_not_tried(selection) -> None:
    kernel = FakeKernel({16: 1.0})
    (choice,) = selection.choose(
        subject(selection, kernel, [{"rows": 4}, DEFAULT]), deadline=float("inf")
    )
    assert choice.num_tried == 0


def test_a_wrong_default_is_an_error(selection) -> None:
    kernel = FakeKernel({16: 1.0})
    kernel.correct = lambda: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="default configuration gives a wrong result"):
        selection.choose(subject(selection, kernel, tiles(32)), deadline=float("inf"))


def test_no_candidate_is_tried_after_the_deadline(selection) -> None:
    kernel = FakeKernel({16: 1.0, 32: 0.5, 64: 0.1})
    times = iter([0.0, 2.0])
    (choice,) = selection.choose(
        subject(selection, kernel, tiles(32, 64)), deadline=1.0, now=lambda: next(times)
    )
    assert (choice.num_tried, choice.num_untried) == (1, 1)
    assert choice.config == {"tile": 32, "num_warps": 4}


def test_threads_compile_candidates_ahead(selection) -> None:
    kernel = FakeKernel({16: 1.0, 32: 0.5, 64: 0.1})
    work = subject(selection, kernel, tiles(32, 64, 512))
    (choice,) = selection.choose(work, deadline=float("inf"), num_threads=2)
    assert choice.config == {"tile": 64, "num_warps": 4}
    assert kernel.launched.count(64) == 3  # compiled, checked, timed


def test_two_kernels_of_one_call_are_tuned_one_after_the_other(selection) -> None:
    cost = {16: 4, 32: 2}

    def launch() -> int:
        first = configuration("fake", "first", CPU, DEFAULT)["tile"]
        second = configuration("fake", "second", CPU, DEFAULT)["tile"]
        return cost[first] + cost[second]

    work = selection.Subject(
        "fake", launch, lambda: True, launch, lambda operation, shape_class: tiles(32)
    )
    first, second = selection.choose(work, deadline=float("inf"))
    assert (first.seconds, first.default_seconds) == (6, 8)
    assert (second.seconds, second.default_seconds) == (4, 6)


def test_an_override_applies_only_inside_its_context() -> None:
    with overriding(lambda operation, shape_class, default: {**default, "tile": 99}):
        assert configuration("fake", "large", CPU, DEFAULT) == {"tile": 99, "num_warps": 4}
    assert configuration("fake", "large", CPU, DEFAULT) == DEFAULT


def test_a_launch_reads_its_shape_class_from_the_devices_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_table(tmp_path / "cpu.json", {"fake": {"large": {"tile": 64}}})
    monkeypatch.setattr(launch_configurations, "table_file", lambda key: tmp_path / f"{key}.json")
    launch_configurations._table.cache_clear()
    try:
        assert configuration("fake", "large", CPU, DEFAULT) == {"tile": 64, "num_warps": 4}
        assert configuration("fake", "small", CPU, DEFAULT) == DEFAULT
        assert configuration("other", "large", CPU, DEFAULT) == DEFAULT
    finally:
        launch_configurations._table.cache_clear()


def test_writing_merges_into_the_table_and_sorts_it(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    write_table(file, {"b": {"y": {"tile": 1}, "x": {"tile": 2}}})
    write_table(file, {"b": {"x": {"tile": 3}}, "a": {"z": {"num_warps": 4, "num_stages": 2}}})
    assert read_table(file) == {
        "a": {"z": {"num_stages": 2, "num_warps": 4}},
        "b": {"x": {"tile": 3}, "y": {"tile": 1}},
    }
    assert file.read_text() == json.dumps(read_table(file), indent=2, sort_keys=True) + "\n"


def test_an_entry_is_removed_when_the_default_is_the_best(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    write_table(file, {"b": {"y": {"tile": 1}, "x": {"tile": 2}}})
    write_table(file, {"b": {"x": None}})
    assert read_table(file) == {"b": {"y": {"tile": 1}}}


def test_shipped_tables_hold_integers_by_operation_and_class() -> None:
    for file in table_file("any").parent.glob("*.json"):
        for operation, classes in read_table(file).items():
            assert (table_file("any").parents[1] / operation).is_dir(), (
                f"{file.name} tunes {operation}, which is not an operation"
            )
            for shape_class, config in classes.items():
                assert all(isinstance(value, int) for value in config.values()), (
                    f"{file.name}: {operation}, {shape_class}"
                )
