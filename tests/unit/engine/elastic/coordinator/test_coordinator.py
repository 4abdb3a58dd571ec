"""The coordinator's process: ranks, HTTP, metrics, and kills at any time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from baton_engine.elastic.coordinator.coordinator import LINGER_S
from baton_engine.elastic.coordinator.coordinator_metrics import CoordinatorMetrics
from baton_engine.elastic.coordinator.operation import Ended, Rebalancing
from baton_protocol.topology import ExpertLoads, OperationPhase, RankPhase, TopologyStatus
from support.elastic.coordinator_process import DEADLINE_S, HOST, CoordinatorProcess, LiveRanks


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(tmp_path)
    yield process
    process.kill()


@pytest.fixture
def ranks(coordinator: CoordinatorProcess) -> Iterator[LiveRanks]:
    live = LiveRanks(coordinator)
    yield live
    live.close()


def test_a_group_forms_grows_shrinks_and_recovers(
    coordinator: CoordinatorProcess, ranks: LiveRanks
) -> None:
    group = ranks.form("a", "b")
    group["c"] = ranks.add("c")
    coordinator.ask("more", "a", "b", "c")
    ranks.until(lambda: ranks.serve_together("a", "b", "c"), "three ranks")
    coordinator.ask("less", "b", "c")
    ranks.until(
        lambda: ranks.serve_together("b", "c") and ranks.phase() is OperationPhase.DONE, "two ranks"
    )
    assert group["a"].phase is RankPhase.STANDBY
    group["b"].alive = False
    ranks.until(
        lambda: ranks.serve_together("c") and coordinator.topology().generation > 3, "recovery"
    )
    topology = coordinator.topology()
    assert topology.desired == ["b", "c"]
    assert [
        (member.name, member.rank) for member in topology.members if member.rank is not None
    ] == [("c", 0)]


def test_a_coordinator_that_is_deleted_with_its_ranks_ends_after_them(
    coordinator: CoordinatorProcess, ranks: LiveRanks
) -> None:
    group = ranks.form("a", "b")
    group["b"].num_requests = 1
    coordinator.process.send_signal(signal.SIGTERM)
    for rank in group.values():
        rank.leaving = True
    deadline = time.monotonic() + 2 * LINGER_S
    ranks.until(lambda: time.monotonic() > deadline, "a request that is still running")
    assert coordinator.process.poll() is None
    assert all(rank.phase is RankPhase.SERVING for rank in group.values())
    group["b"].num_requests = 0
    ranks.until(
        lambda: all(rank.phase is RankPhase.STANDBY for rank in group.values()),
        "the end",
        timeout_s=2.0,
    )
    ranks.until(lambda: coordinator.process.poll() == 0, "the coordinator's end", timeout_s=5.0)


def test_a_coordinator_that_is_deleted_alone_does_not_wait_for_its_ranks(
    coordinator: CoordinatorProcess, ranks: LiveRanks
) -> None:
    ranks.form("a", "b")
    coordinator.process.send_signal(signal.SIGTERM)
    ranks.until(
        lambda: coordinator.process.poll() == 0, "the coordinator's end", timeout_s=3 * LINGER_S
    )


@pytest.mark.parametrize(
    "phase", [OperationPhase.WAITING, OperationPhase.PREPARING, OperationPhase.COMMITTING]
)
@pytest.mark.parametrize("asked_again", [True, False], ids=["asked again", "not asked again"])
def test_a_coordinator_killed_in_this_phase_loses_nothing(
    coordinator: CoordinatorProcess, ranks: LiveRanks, phase: OperationPhase, asked_again: bool
) -> None:
    group = ranks.form("a", "b")
    a, b = group["a"], group["b"]
    if phase is not OperationPhase.WAITING:
        ranks.add("c")
    a.never_finishes_preparing = phase is OperationPhase.PREPARING
    a.never_commits = phase is OperationPhase.COMMITTING
    coordinator.ask("more", "a", "b", "c")
    ranks.until(lambda: ranks.phase() is phase, f"phase {phase}")
    if phase is OperationPhase.COMMITTING:
        ranks.until(
            lambda: a.commit_seen == b.commit_seen != a.committed[-1].nonce,
            "the commit seen by all",
        )
    coordinator.kill()
    for _ in range(20):
        ranks.step_live()
    assert a.phase is RankPhase.SERVING, "the rank stopped serving without the coordinator"
    coordinator.start()
    a.never_finishes_preparing = a.never_commits = False
    if phase is OperationPhase.WAITING:
        ranks.add("c")
    if asked_again:
        coordinator.ask("more", "a", "b", "c")
    if asked_again or phase is OperationPhase.COMMITTING:
        ranks.until(lambda: ranks.serve_together("a", "b", "c"), "all three")
        if asked_again:
            ranks.until(lambda: ranks.phase() is OperationPhase.DONE, "the operation")
    else:
        ranks.until(
            lambda: coordinator.topology().desired == ["a", "b"],
            "the desired members from the ranks' reports",
        )
        ranks.until(
            lambda: all(rank.target is None for rank in (a, b)), "the prepared target to be dropped"
        )
        assert ranks.serve_together("a", "b")
    assert all(rank.phase is not RankPhase.BROKEN for rank in group.values())


def test_a_coordinator_killed_together_with_a_rank_recovers_the_group(
    coordinator: CoordinatorProcess, ranks: LiveRanks
) -> None:
    group = ranks.form("a", "b", "c")
    coordinator.kill()
    group["b"].alive = False
    coordinator.start()
    ranks.until(lambda: ranks.serve_together("a", "c"), "the survivors", timeout_s=10.0)


def test_a_coordinator_without_ranks_ends_on_sigterm_at_once(
    coordinator: CoordinatorProcess,
) -> None:
    start = time.monotonic()
    coordinator.process.send_signal(signal.SIGTERM)
    assert coordinator.process.wait(timeout=DEADLINE_S) == 0
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"operation_id": "o", "members": "a"}, "$.members"),
        ({"operation_id": "o", "members": ["a", 1]}, "$.members[1]"),
        ({"operation_id": "o"}, "members"),
        ({"operation_id": 7, "members": ["a"]}, "$.operation_id"),
        ({"operation_id": "o", "members": ["a"], "ranks": 2}, "ranks"),
        ({"operation_id": "o", "members": []}, "members: "),
        ({"operation_id": "", "members": ["a"]}, "operation_id: "),
        (b"{", "the body"),
        (b"\xff\xff", "the body"),
    ],
)
def test_invalid_requests_are_refused_with_the_field(
    coordinator: CoordinatorProcess, body: object, field: str
) -> None:
    code, text = coordinator.http("PUT", "/topology", body)
    assert code == 400
    assert field in msgspec.json.decode(text)["message"]
    assert coordinator.topology().desired == []


def test_each_http_path_returns_its_status_code(coordinator: CoordinatorProcess) -> None:
    assert [
        coordinator.http("GET", path)[0] for path in ("/health", "/ready", "/metrics", "/nothing")
    ] == [*(200, 200, 200, 404)]
    assert coordinator.http("POST", "/rebalance")[0] == 202
    assert coordinator.http("PUT", "/nothing", {})[0] == 404


def test_invalid_messages_are_counted_and_dropped(
    coordinator: CoordinatorProcess, ranks: LiveRanks
) -> None:
    group = ranks.form("a", "b")
    a = group["a"]
    wrong = msgspec.structs.replace(a.status(), loads=ExpertLoads(((1, 2), (3,))))
    negative = msgspec.structs.replace(a.status(), expert_bytes=-1)
    huge = msgspec.structs.replace(a.status(), num_sparse_layers=2**63)
    fields = [
        msgspec.msgpack.encode(field)
        for field in msgspec.msgpack.decode(msgspec.msgpack.encode(a.status()))
    ]
    deep = (
        b"\xdc" + (len(fields) + 1).to_bytes(2, "big") + b"".join(fields) + b"\x91" * 5000 + b"\xc0"
    )
    for message in (
        b"",
        b"\xc1",
        *map(msgspec.msgpack.encode, ({"a": 1}, wrong, negative, huge)),
        deep,
    ):
        ranks.link(a).send(message)
    ranks.link(a).send_multipart([b"two", b"frames"])
    for digits in (20, 5000):  # a generation that is ignored, and a nonce that is too long
        impossible = msgspec.structs.replace(a.status(), prepared="9" * digits + ".x")
        ranks.link(a).send(msgspec.msgpack.encode(impossible))
    ranks.until(
        lambda: "baton:topology_bad_messages_total 9.0" in coordinator.http("GET", "/metrics")[1],
        "the count",
    )
    group["c"] = ranks.add("c")
    coordinator.ask("more", "a", "b", "c")
    ranks.until(lambda: ranks.serve_together("a", "b", "c"), "three ranks")


def test_metrics_count_operations_and_their_phases(
    coordinator: CoordinatorProcess, ranks: LiveRanks
) -> None:
    assert (
        'baton:topology_operations_total{kind="scale",outcome="done"} 0.0'
        in coordinator.http("GET", "/metrics")[1]
    )
    group = ranks.form("a", "b")
    group["b"].alive = False
    ranks.until(lambda: ranks.serve_together("a"), "recovery")
    ranks.until(lambda: ranks.phase() is not OperationPhase.COMMITTING, "the end of the operation")
    text = coordinator.http("GET", "/metrics")[1]
    assert 'baton:topology_operations_total{kind="form",outcome="done"} 1.0' in text
    assert 'baton:topology_operations_total{kind="recover",outcome="done"} 1.0' in text
    assert (
        'baton:topology_operation_phase_seconds_count{kind="form",phase="committing"} 1.0' in text
    )
    assert 'baton:topology_members{phase="serving"} 1.0' in text
    assert f"baton:topology_generation {group['a'].committed[-1].number:.1f}" in text


def test_metrics_give_the_balance_and_the_moves_of_a_rebalance() -> None:
    metrics = CoordinatorMetrics()
    status = TopologyStatus(generation=1, desired=[], members=[])
    assert (
        'baton:topology_rebalance_imbalance{when="before"} 0.0'
        in metrics.text(status, 0.0).decode()
    )
    rebalancing = Rebalancing(placement=(), before=1.5, after=1.1)
    metrics.on_ended(Ended("rebalance", OperationPhase.DONE, {}, 3, 300, rebalancing))
    metrics.on_ended(Ended("rebalance", OperationPhase.FAILED, {}, 0))
    text = metrics.text(status, 1.2).decode()
    for sample in (
        'baton:topology_rebalance_imbalance{when="before"} 1.5',
        'baton:topology_rebalance_imbalance{when="after"} 1.1',
        "baton:topology_expert_imbalance 1.2",
        "baton:topology_expert_moves_total 3.0",
        "baton:topology_expert_moved_bytes_total 300.0",
        'baton:topology_operations_total{kind="rebalance",outcome="done"} 1.0',
    ):
        assert sample in text


def test_a_port_in_use_is_named(coordinator: CoordinatorProcess) -> None:
    command = [
        sys.executable,
        "-m",
        "baton_engine.elastic.coordinator.coordinator_cli",
        "--port",
        str(coordinator.port),
    ]
    ended = subprocess.run(
        command, env={"POD_IP": HOST}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 1
    assert f"cannot bind ports {coordinator.port}" in ended.stderr


def test_the_coordinator_does_not_import_torch_or_numpy() -> None:
    program = (
        "import sys, baton_engine.elastic.coordinator.coordinator_cli; "
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.stdout == "set()\n"
