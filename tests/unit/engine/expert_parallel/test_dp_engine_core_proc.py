"""Ranks as processes with real groups: behaviour towards clients, probes and the coordinator."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.wire import StoreAddress
from baton_engine.expert_parallel.dp_engine_core_proc import DPEngineCoreProc
from baton_engine.models.errors import ConfigurationError
from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError, UtilityError
from baton_protocol.engine_messages import ErrorCode
from baton_protocol.options.config import EngineConfig, ModelConfig, ParallelConfig
from baton_protocol.topology import Activity, RankPhase
from support.engine.engine_fakes import continuation
from support.engine.engine_process import (
    DEADLINE_S,
    EngineProcess,
    collect,
    connect,
    request,
    tokens,
)
from support.engine.ranks.rank_processes import ScriptedCoordinator
from support.waiting import eventually, until


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    coordinator = ScriptedCoordinator()
    yield coordinator
    coordinator.close()


Ranks = Callable[..., dict[str, EngineProcess]]


@pytest.fixture
def ranks(coordinator: ScriptedCoordinator, tmp_path: Path) -> Iterator[Ranks]:
    started: list[EngineProcess] = []

    def start(*names: str, drain_timeout_s: float = 8, **env: str) -> dict[str, EngineProcess]:
        engines = {}
        for name in names:
            folder = tmp_path / name
            folder.mkdir()
            flags = (
                "--executor",
                "support.engine.ranks.rank_processes.IndependentExpertExecutor",
                "--rank-name",
                name,
            )
            group = ("--enable-expert-parallel", "--coordinator", f"127.0.0.1:{coordinator.port}")
            engines[name] = EngineProcess(
                folder, *flags, *group, "--drain-timeout-s", str(drain_timeout_s), **env
            )
            started.append(engines[name])
        coordinator.until(list(names), "standby", phase=RankPhase.STANDBY)
        return engines

    yield start
    for engine in started:
        engine.kill()


def ready_reason(engine: EngineProcess) -> str:
    return json.loads(engine.http("GET", "/ready")[1])["reason"]


async def until_draining(client: EngineClient, draining: bool) -> None:
    await until(
        lambda: client.status is not None and client.status.draining is draining,
        f"draining={draining}",
        DEADLINE_S,
    )


async def test_a_rank_is_ready_with_its_first_generation_and_reports_every_later_one(
    ranks, coordinator
) -> None:
    engines = ranks("a", "b")
    a = engines["a"]
    assert a.http("GET", "/health")[0] == 200
    assert ready_reason(a) == "Standby"
    await asyncio.to_thread(coordinator.commit, 1, ["b", "a"])
    async with (
        await connect(a, heartbeat_interval_s=0.1) as client,
        await connect(engines["b"]) as other,
    ):
        assert (client.ready.data_parallel_rank, client.ready.data_parallel_size) == (1, 2)
        assert client.init.compatibility_hash == "fake-hash"
        assert a.http("GET", "/ready")[0] == 200
        streams = [each.add(request("r", [3, 1], 30)) for each in (client, other)]
        for stream in streams:
            assert tokens(await collect(stream)) == continuation([3, 1], 30, ignore_eos=True)
        (refused,) = await collect(client.add(request("wrong", [1], data_parallel_rank=0)))
        assert refused.error_code is ErrorCode.DRAINING
        with pytest.raises(UtilityError, match="cannot sleep"):
            await client.call("sleep", 1)
        # A commit during a request keeps the connection.
        stream = client.add(request("long", [5], 200))
        await anext(stream)
        await asyncio.to_thread(coordinator.commit, 2, ["a"], directed=["a", "b"])
        assert len(tokens(await collect(stream))) == 199
        assert (client.ready.data_parallel_rank, client.ready.data_parallel_size) == (0, 1)
    metrics = a.http("GET", "/metrics")[1]
    labels = 'model_name="nowhere"'
    assert f"baton:topology_generation{{{labels}}} 2.0" in metrics
    assert f"baton:topology_size{{{labels}}} 1.0" in metrics
    assert f'baton:topology_phase{{{labels},phase="serving"}} 1.0' in metrics
    assert f'baton:topology_phase{{{labels},phase="broken"}} 0.0' in metrics
    assert f'baton:topology_commit_pause_seconds_count{{kind="planned",{labels}}} 2.0' in metrics
    assert f'baton:topology_commit_pause_seconds_count{{kind="broken",{labels}}} 0.0' in metrics
    status = coordinator.statuses["a"]
    assert (status.num_sparse_layers, status.num_experts) == (2, 4)
    assert status.member.engine_port == a.engine_port


def test_stores_delete_the_keys_of_old_generations(ranks, coordinator) -> None:
    """A store has a limit, so old keys would stop a group after many topology changes."""
    ranks("a", "b")
    coordinator.commit(1, ["a", "b"])
    members = [coordinator.statuses[name].member for name in ("a", "b")]
    stores = [
        connect_store(StoreAddress(each.host, each.store_port), DEADLINE_S) for each in members
    ]
    after_first = sum(store.num_keys() for store in stores)
    assert after_first > 0
    for number in range(2, 5):
        coordinator.commit(number, ["a", "b"])

    def deleted() -> bool:
        kept = sum(store.num_keys() for store in stores)
        assert kept == after_first, f"{kept} keys, {after_first} after the first generation"
        return True

    eventually(
        deleted, timeout_s=DEADLINE_S, what="the keys of three of four generations are deleted"
    )


async def test_a_removed_rank_ends_its_requests_with_draining_and_stays_healthy(
    ranks, coordinator
) -> None:
    engines = ranks("a", "b", BATON_FAKE_STEP_S="0.02")
    await asyncio.to_thread(coordinator.commit, 1, ["a", "b"])
    async with await connect(engines["b"], heartbeat_interval_s=0.1) as client:
        await until_draining(client, False)
        stream = client.add(request("r", [1, 2], 250))
        await anext(stream)
        await asyncio.to_thread(coordinator.commit, 2, ["a"], directed=["a", "b"])
        last = (await collect(stream))[-1]
        assert last.error_code is ErrorCode.DRAINING
        assert "continues without this rank" in last.error
        await until_draining(client, True)
        (late,) = await collect(client.add(request("late", [1])))
        assert late.error_code is ErrorCode.DRAINING
        assert ready_reason(engines["b"]) == "Standby"
        assert engines["b"].http("GET", "/health")[0] == 200
        await asyncio.to_thread(coordinator.commit, 3, ["a", "b"])
        await until_draining(client, False)
        assert tokens(await collect(client.add(request("again", [1], 5))))


async def test_ranks_keep_their_requests_after_kill_9_of_another_rank(ranks, coordinator) -> None:
    engines = ranks("a", "b", "c", BATON_FAKE_STEP_S="0.02")
    await asyncio.to_thread(coordinator.commit, 1, ["a", "b", "c"])
    async with await connect(engines["a"]) as client, await connect(engines["c"]) as other:
        streams = [each.add(request("r", [7], 150)) for each in (client, other)]
        received = [[await anext(stream)] for stream in streams]
        engines["b"].kill()
        gone = coordinator.statuses["b"].member.instance_id
        for name in ("a", "c"):
            await asyncio.to_thread(
                coordinator.until, [name], "BROKEN", phase=RankPhase.BROKEN, suspects=(gone,)
            )
            assert engines[name].http("GET", "/ready")[0] == 200
        more = client.add(request("more", [9], 10))
        await asyncio.to_thread(coordinator.commit, 2, ["a", "c"], urgent=True)
        for stream, outputs in zip(streams, received, strict=True):
            outputs += await collect(stream)
            assert tokens(outputs) == continuation([7], 150, ignore_eos=True)
            assert [output.token_offset for output in outputs] == list(range(150))
        assert tokens(await collect(more)) == continuation([9], 10, ignore_eos=True)


async def test_a_frozen_rank_stalls_the_others_until_a_generation_without_it(
    ranks, coordinator
) -> None:
    engines = ranks("a", "b", BATON_FAKE_STEP_S="0.005")
    await asyncio.to_thread(coordinator.commit, 1, ["a", "b"])
    async with await connect(engines["a"]) as client:
        stream = client.add(request("r", [7], 100))
        outputs = [await anext(stream)]
        engines["b"].process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(coordinator.commit, 2, ["a"], urgent=True)
        outputs += await collect(stream)
        assert tokens(outputs) == continuation([7], 100, ignore_eos=True)
        coordinator.direct(["b"], None, dismissed=True)
        engines["b"].process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(
            coordinator.until, ["b"], "standby", phase=RankPhase.STANDBY, generation=None
        )


async def test_a_rank_waits_after_sigterm_for_a_generation_without_it(ranks, coordinator) -> None:
    engines = ranks("a", "b")
    await asyncio.to_thread(coordinator.commit, 1, ["a", "b"])
    engines["b"].process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(
        coordinator.until, ["b"], "leaving", leaving=True, phase=RankPhase.SERVING
    )
    assert ready_reason(engines["b"]) == "Draining"
    async with await connect(engines["a"]) as client:  # the leaving rank still runs dummy batches
        assert tokens(await collect(client.add(request("r", [1], 20)))) == continuation(
            [1], 20, ignore_eos=True
        )
    await asyncio.to_thread(coordinator.commit, 2, ["a"], directed=["a", "b"])
    assert await asyncio.to_thread(engines["b"].process.wait, DEADLINE_S) == 0
    assert coordinator.statuses["a"].phase is RankPhase.SERVING


async def test_a_leaving_rank_ends_at_its_drain_timeout_or_at_a_second_signal(
    ranks, coordinator
) -> None:
    engines = ranks("a", "b", "c", drain_timeout_s=8, BATON_FAKE_STEP_S="0.1")
    await asyncio.to_thread(coordinator.commit, 1, ["a", "b", "c"])
    async with await connect(engines["b"]) as client, await connect(engines["c"]) as other:
        streams = [each.add(request("r", [1, 2], 250)) for each in (client, other)]
        for stream in streams:
            await anext(stream)
        for engine in (engines["b"], engines["c"]):
            engine.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(coordinator.until, ["b", "c"], "leaving", leaving=True)
        engines["b"].process.send_signal(signal.SIGTERM)
        assert (await collect(streams[0]))[-1].error_code is ErrorCode.DRAINING
        assert await asyncio.to_thread(engines["b"].process.wait, DEADLINE_S) == 0
        await asyncio.to_thread(coordinator.until, ["c"], "BROKEN", phase=RankPhase.BROKEN)
        assert (await collect(streams[1]))[-1].error_code is ErrorCode.DRAINING
        assert await asyncio.to_thread(engines["c"].process.wait, DEADLINE_S) == 0


async def test_all_ranks_end_after_sigterm_when_they_are_dismissed(ranks, coordinator) -> None:
    engines = ranks("a", "b", drain_timeout_s=600, BATON_FAKE_STEP_S="0.005")
    await asyncio.to_thread(coordinator.commit, 1, ["a", "b"])
    async with await connect(engines["a"]) as client:
        stream = client.add(request("r", [1, 2], 100))
        outputs = [await anext(stream)]
        for engine in engines.values():
            engine.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(coordinator.until, ["a", "b"], "leaving", leaving=True)
        outputs += await collect(stream)
        assert tokens(outputs) == continuation([1, 2], 100, ignore_eos=True)
    await asyncio.to_thread(coordinator.until, ["a", "b"], "idle", num_running=0, num_waiting=0)
    coordinator.direct(["a", "b"], None, dismissed=True)
    for engine in engines.values():
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S / 2) == 0


async def test_a_dismissed_rank_with_a_stalled_loop_fails_its_requests(ranks, coordinator) -> None:
    engines = ranks("a", BATON_FAKE_STEP_S="600")
    await asyncio.to_thread(coordinator.commit, 1, ["a"])
    async with await connect(engines["a"], heartbeat_interval_s=0.1) as client:
        stream = client.add(request("r", [1, 2], 5))
        await asyncio.to_thread(coordinator.until, ["a"], "a step", activity=Activity.RUNS)
        coordinator.direct(["a"], None, dismissed=True)
        await until_draining(client, True)
        assert ready_reason(engines["a"]) == "Standby"
        with pytest.raises(EngineDeadError, match="its loop is stalled"):
            await collect(stream)
    status, body = engines["a"].http("GET", "/health")
    assert (status, json.loads(body)["reason"]) == (503, "Failed")


def test_sigterm_in_standby_ends_the_rank_at_once(ranks, coordinator) -> None:
    engines = ranks("a")
    engines["a"].process.send_signal(signal.SIGTERM)
    assert engines["a"].process.wait(DEADLINE_S) == 0


def test_sigterm_of_the_only_rank_ends_it_at_once(ranks, coordinator) -> None:
    engines = ranks("a")
    coordinator.commit(1, ["a"])
    engines["a"].process.send_signal(signal.SIGTERM)
    assert engines["a"].process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("name", ["Rank_0", "a.b", "a" * 64, "-a", "a\nb"])
def test_a_rank_name_that_is_no_dns_label_is_refused(name: str) -> None:
    config = EngineConfig(model=ModelConfig(path="m"), parallel=ParallelConfig(rank_name=name))
    with pytest.raises(ConfigurationError, match="is not a DNS label"):
        DPEngineCoreProc(config, "127.0.0.1")
