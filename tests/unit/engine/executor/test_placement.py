"""Workers of one host get cores of their own: as many for each, near one another, and no more than the container may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.executor.placement import Core, bindings, cpu_limit, place, usable_cores
from baton_protocol.config import EngineConfig, ModelConfig


@st.composite
def machines(draw: st.DrawFn) -> list[Core]:
    """Up to four nodes of any sizes, their cores numbered in any order, with one or two hardware threads per core."""
    siblings = range(draw(st.integers(1, 2)))
    nodes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=24))
    return [
        Core(node, tuple(core + len(nodes) * sibling for sibling in siblings))
        for core, node in enumerate(nodes)
    ]


@given(machines(), st.integers(1, 16), st.none() | st.floats(0.1, 64))
def test_ranks_get_equally_many_cores_of_their_own(
    cores: list[Core], num_ranks: int, limit: float | None
) -> None:
    places = place(cores, num_ranks, limit)
    own = [[core for core in cores if set(core.cpus) <= cpus] for cpus, _ in places]
    assert len(places) == num_ranks
    for rank, (cpus, num_threads) in enumerate(places):
        assert cpus == {cpu for core in own[rank] for cpu in core.cpus}, (
            "a core is given with all its siblings"
        )
        assert len(own[rank]) == len(own[0])
        assert 1 <= num_threads <= len(own[rank])
        if num_ranks <= len(cores):
            assert all(cpus.isdisjoint(other) for other, _ in places[:rank])
        if len({core.node for core in cores}) <= num_ranks <= len(cores):
            assert len({core.node for core in own[rank]}) == 1
    if limit is not None:
        assert sum(num_threads for _, num_threads in places) <= max(limit, num_ranks), (
            "time is granted for no more"
        )


def test_one_rank_takes_all_cores_of_all_nodes() -> None:
    cores = [Core(node=cpu % 2, cpus=(cpu,)) for cpu in range(8)]
    assert place(cores, 1) == [(frozenset(range(8)), 8)]
    assert [sorted(rank.cpus) for rank in place(cores, 2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_more_ranks_than_cores_share_them_all() -> None:
    assert place([Core(0, (3,)), Core(0, (5,))], 3) == [(frozenset({3, 5}), 1)] * 3


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


def test_without_the_systems_files_every_cpu_is_a_core(tmp_path: Path) -> None:
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
def test_the_least_limit_of_a_group_and_those_above_counts(
    tmp_path: Path, own: str, above: str, limit: float | None
) -> None:
    group = "sys__fs__cgroup__pods__"
    write(tmp_path, proc__self__cgroup="0::/pods/this")
    write(tmp_path, **{f"{group}this__cpu.max": own, f"{group}cpu.max": above})
    assert cpu_limit(tmp_path) == limit


@pytest.mark.parametrize("text", ["", "max", "100000 0", "a b"])
def test_a_limit_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, proc__self__cgroup="0::/", **{"sys__fs__cgroup__cpu.max": text})
    assert cpu_limit(tmp_path) is None


@pytest.mark.parametrize(("quota", "limit"), [("-1", None), ("50000", 0.5)])
def test_version_1_of_control_groups_is_read_too(
    tmp_path: Path, quota: str, limit: float | None
) -> None:
    write(tmp_path, proc__self__cgroup="4:memory:/x\n1:cpuacct,cpu:/x\n0::/x")
    for name, text in (("quota", quota), ("period", "100000")):
        write(tmp_path, **{f"sys__fs__cgroup__cpu__x__cpu.cfs_{name}_us": text})
    assert cpu_limit(tmp_path) == limit


def test_workers_are_bound_only_where_that_cannot_hurt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(
        "baton_engine.executor.placement.usable_cores",
        lambda cpus: [Core(0, (cpu,)) for cpu in cpus],
    )

    def bound(num_ranks: int = 2, **fields: object) -> list[list[int]]:
        config = EngineConfig(model=ModelConfig(path="/no/model"), **fields)  # type: ignore[arg-type]
        return [sorted(cpus) for cpus in bindings(config, num_ranks, tmp_path)]

    assert bound() == bound(num_threads=2) == bound(device="cpu") == [[0, 1], [2, 3]]
    nowhere: list[list[int]] = [[], []]
    assert bound(bind_threads=False) == nowhere, "it is switched off"
    assert bound(num_threads=3) == nowhere, "threads would wait for each other"
    assert bound(1) == [[]], "nobody to share with"
    assert bound(device="cuda") == nowhere
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert bound() == nowhere, "they will probably compute on GPUs"
    assert bound(device="cpu") == [[0, 1], [2, 3]]
