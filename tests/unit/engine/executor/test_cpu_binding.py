"""CPU binding of workers: equal numbers of cores on few nodes, within the container's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.executor.cpu_binding import Core, assign_cores, bindings, cpu_limit, usable_cores
from baton_protocol.options.config import EngineConfig, ModelConfig


@st.composite
def machines(draw: st.DrawFn) -> list[Core]:
    """Draw a machine of up to four nodes, with one or two hardware threads per core."""
    siblings = range(draw(st.integers(1, 2)))
    nodes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=24))
    return [
        Core(node, tuple(core + len(nodes) * sibling for sibling in siblings))
        for core, node in enumerate(nodes)
    ]


@given(machines(), st.integers(1, 16), st.none() | st.floats(0.1, 64))
def test_ranks_get_equal_numbers_of_separate_cores(
    cores: list[Core], num_ranks: int, limit: float | None
) -> None:
    workers = assign_cores(cores, num_ranks, limit)
    own = [[core for core in cores if set(core.cpus) <= cpus] for cpus, _ in workers]
    assert len(workers) == num_ranks
    for rank, (cpus, num_threads) in enumerate(workers):
        assert cpus == {cpu for core in own[rank] for cpu in core.cpus}, (
            "a rank gets all hardware threads of a core"
        )
        assert len(own[rank]) == len(own[0])
        assert 1 <= num_threads <= len(own[rank])
        if num_ranks <= len(cores):
            assert all(cpus.isdisjoint(other) for other, _ in workers[:rank])
        if len({core.node for core in cores}) <= num_ranks <= len(cores):
            assert len({core.node for core in own[rank]}) == 1
    if limit is not None:
        assert sum(num_threads for _, num_threads in workers) <= max(limit, num_ranks), (
            "the threads exceed the CPU limit"
        )


def test_one_rank_takes_all_cores_of_all_nodes() -> None:
    cores = [Core(node=cpu % 2, cpus=(cpu,)) for cpu in range(8)]
    assert assign_cores(cores, 1) == [(frozenset(range(8)), 8)]
    assert [sorted(rank.cpus) for rank in assign_cores(cores, 2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_more_ranks_than_cores_share_all_cores() -> None:
    assert assign_cores([Core(0, (3,)), Core(0, (5,))], 3) == [(frozenset({3, 5}), 1)] * 3


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_cores_and_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    system = "sys__devices__system__"
    write(
        tmp_path,
        **{f"{system}node__node0__cpulist": "0-1,4-5", f"{system}node__node1__cpulist": "2-3,6,7"},
    )
    for cpu in range(8):
        siblings = f"{cpu % 4},{cpu % 4 + 4}"
        write(tmp_path, **{f"{system}cpu__cpu{cpu}__topology__thread_siblings_list": siblings})
    assert usable_cores({0, 1, 2, 4, 7}, tmp_path) == [(0, (0, 4)), (0, (1,)), (1, (2,)), (1, (7,))]


def test_every_cpu_is_a_core_without_the_files_of_sysfs(tmp_path: Path) -> None:
    assert usable_cores({3, 1}, tmp_path) == [(0, (1,)), (0, (3,))]
    assert cpu_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("own", "above", "limit"),
    [
        ("max 100000", "max 100000", None),
        ("400000 100000", "max 100000", 4),
        ("400000 100000", "150000 100000", 1.5),
    ],
)
def test_the_smallest_limit_of_a_cgroup_and_its_parents_applies(
    tmp_path: Path, own: str, above: str, limit: float | None
) -> None:
    group = "sys__fs__cgroup__pods__"
    write(tmp_path, proc__self__cgroup="0::/pods/this")
    write(tmp_path, **{f"{group}this__cpu.max": own, f"{group}cpu.max": above})
    assert cpu_limit(tmp_path) == limit


@pytest.mark.parametrize("text", ["", "max", "100000 0", "a b"])
def test_an_invalid_cgroup_limit_is_ignored(tmp_path: Path, text: str) -> None:
    write(tmp_path, proc__self__cgroup="0::/", **{"sys__fs__cgroup__cpu.max": text})
    assert cpu_limit(tmp_path) is None


@pytest.mark.parametrize(("quota", "limit"), [("-1", None), ("50000", 0.5)])
def test_limits_of_cgroup_v1_are_read(tmp_path: Path, quota: str, limit: float | None) -> None:
    write(tmp_path, proc__self__cgroup="4:memory:/x\n1:cpuacct,cpu:/x\n0::/x")
    for name, text in (("quota", quota), ("period", "100000")):
        write(tmp_path, **{f"sys__fs__cgroup__cpu__x__cpu.cfs_{name}_us": text})
    assert cpu_limit(tmp_path) == limit


def test_workers_are_bound_only_if_they_share_the_cpus_and_compute_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(
        "baton_engine.executor.cpu_binding.usable_cores",
        lambda cpus: [Core(0, (cpu,)) for cpu in cpus],
    )

    def bound(num_ranks: int = 2, **fields: Any) -> list[list[int]]:
        config = EngineConfig(model=ModelConfig(path="/no/model"), **fields)
        return [sorted(cpus) for cpus in bindings(config, num_ranks, tmp_path)]

    assert bound() == bound(num_threads=2) == bound(device="cpu") == [[0, 1], [2, 3]]
    nowhere: list[list[int]] = [[], []]
    assert bound(bind_threads=False) == nowhere, "binding is switched off"
    assert bound(num_threads=3) == nowhere, "there are more threads than cores"
    assert bound(1) == [[]], "a single worker needs no binding"
    assert bound(device="cuda") == nowhere
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert bound() == nowhere, "the workers probably compute on GPUs"
    assert bound(device="cpu") == [[0, 1], [2, 3]]
