"""What an engine reports while it loads, pauses, sleeps, stalls or fails: probes and heartbeats."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING

import pytest

from baton_protocol.engine_messages import ErrorCode
from support.engine.engine_process import DEADLINE_S, HOST, collect, connect, request, wait_for
from support.waiting import eventually, until

if TYPE_CHECKING:
    pass


async def test_http_reports_loading_ready_and_draining(start) -> None:
    engine = start(BATON_FAKE_LOAD_S="3.0")
    status, body = engine.http("GET", "/ready")
    assert (status, json.loads(body)["reason"]) == (503, "Loading")
    assert engine.http("GET", "/health")[0] == 200
    engine.wait_ready()
    async with await connect(engine) as client:
        assert client.ready is not None
        assert client.ready.max_model_len == 256
        await collect(client.add(request("r", [1, 2, 3])))
        metrics = engine.http("GET", "/metrics")[1]
        assert 'baton:prompt_tokens_computed_total{model_name="nowhere"} 3.0' in metrics
        assert 'baton:generation_tokens_total{model_name="nowhere"} 8.0' in metrics
        for _ in range(2):
            assert json.loads(engine.http("POST", "/drain")[1]) == {
                "draining": True,
                "unfinished": 0,
            }
        assert json.loads(engine.http("GET", "/drain")[1]) == {"draining": True, "unfinished": 0}
        assert json.loads(engine.http("GET", "/ready")[1])["reason"] == "Draining"
        (output,) = await collect(client.add(request("late", [1])))
        assert output.error_code is ErrorCode.DRAINING
        assert engine.http("GET", "/nothing")[0] == 404


async def test_pauses_and_sleeps_are_reported_in_heartbeats_and_by_the_readiness_probe(
    start,
) -> None:
    engine = start(BATON_FAKE_STEP_S="0.01")

    def why_not_ready() -> str:
        status, body = engine.http("GET", "/ready")
        assert status == 503
        return json.loads(body)["reason"]

    def resumed_s() -> float | None:
        return json.loads(engine.http("GET", "/ready")[1]).get("resumed_s")

    assert resumed_s() is None
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2], 50))
        await anext(stream)
        assert not client.status or client.status.stalled_s < 2
        await client.call("pause", "keep")
        await until(lambda: client.status and client.status.stalled_s > 2, "a frozen request")
        assert client.status.paused
        assert not client.status.asleep
        assert not client.accepts_requests
        assert why_not_ready() == "Paused"
        paused_s = resumed_s()
        assert paused_s is not None
        assert paused_s < 2, "the time since the last moment of the pause"
        await client.call("resume")
        await collect(stream)
        await until(lambda: client.accepts_requests, "the engine to accept requests again")
        assert client.status.stalled_s < 2
        await client.call("sleep", 1)
        await until(lambda: client.status.asleep, "the sleep in a PONG")
        assert why_not_ready() == "Asleep"
        await client.call("wake_up")
        await until(lambda: client.accepts_requests, "the engine to accept requests again")
        assert engine.http("GET", "/ready")[0] == 200
        before, now = resumed_s(), resumed_s()
        assert before is not None
        assert now is not None
        assert 0 < before < now, "the time since the wake-up grows"


@pytest.mark.parametrize("level", [1, 2])
async def test_clients_receive_the_hash_of_weights_that_changed_in_a_sleep(start, level) -> None:
    async with await connect(start()) as client:
        before = client.init
        await client.call("sleep", level)
        await until(lambda: client.status and client.status.asleep, "the sleep in a PONG")
        await client.call("wake_up")
        await until(lambda: client.accepts_requests, "the engine to accept requests again")
        assert client.init.instance_id == before.instance_id
        changed = client.init.compatibility_hash != before.compatibility_hash
        assert changed == (level == 2)


async def test_requests_that_a_pause_leaves_waiting_make_no_progress(start) -> None:
    async with await connect(start("--max-num-seqs", "1", BATON_FAKE_STEP_S="0.01")) as client:
        running, waiting = (client.add(request(name, [1, 2], 20)) for name in ("r", "w"))
        await anext(running)
        pausing = asyncio.create_task(client.call("pause", "wait"))
        await collect(running)
        await pausing
        await until(lambda: client.status and client.status.stalled_s > 2, "a frozen request")
        await client.call("resume")
        await collect(waiting)


async def test_a_step_that_does_not_end_is_reported_in_heartbeats(start) -> None:
    async with await connect(start(BATON_FAKE_STEP_S="600")) as client:
        client.add(request("r", [1, 2], 50))
        await until(lambda: client.status and client.status.stalled_s > 2, "a stalled loop")
        assert client.dead_reason is None


def test_an_engine_with_a_failed_kv_connector_is_neither_healthy_nor_ready(start) -> None:
    engine = start("--executor", "support.engine.engine_fakes.FailedTransferExecutor")
    wait_for(lambda: engine.http("GET", "/health")[0] == 503, "503 of /health", engine)
    for path in ("/health", "/ready"):
        status, body = engine.http("GET", path)
        assert (status, json.loads(body)["reason"]) == (503, "KVTransferFailed")
        assert "a defect" in json.loads(body)["message"]


def test_reads_of_the_state_do_not_call_the_loop(monkeypatch) -> None:
    """Clients without the service key may send them, in any number."""
    from baton_engine.server import engine_core_proc
    from baton_protocol.options.config import EngineConfig, ModelConfig

    monkeypatch.setattr(engine_core_proc, "ADMIN_TIMEOUT_S", 0.0)
    config = EngineConfig(model=ModelConfig(path="/nowhere"), engine_port=0)
    proc = engine_core_proc.EngineCoreProc(config, HOST)
    proc.state = engine_core_proc.State.SERVING  # although no loop runs
    try:
        assert proc.drain_status(start=False).unfinished == 0
        assert proc.run_admin_call("is_paused", {}) is False
        assert proc.run_admin_call("is_sleeping", {}) is False
        assert proc.io.input_queue.empty()
        with pytest.raises(TimeoutError, match="did not answer"):
            proc.drain_status(start=True)
    finally:
        proc.io.close()


def test_the_time_since_a_sleep_counts_from_the_end_of_the_wake_up(monkeypatch) -> None:
    from baton_engine.server.engine_core_proc import EngineCoreProc
    from baton_protocol.options.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from support.engine.engine_fakes import FakeExecutor

    woken_at = 0.0
    call = FakeExecutor.collective_rpc

    def slow(self, method, *args, **options) -> list:
        nonlocal woken_at
        result = call(self, method, *args, **options)
        if method == "wake_up":
            time.sleep(0.2)  # the time in which weights are read
            woken_at = time.monotonic()
        return result

    monkeypatch.setattr(FakeExecutor, "collective_rpc", slow)
    config = EngineConfig(
        model=ModelConfig(path="/nowhere"),
        cache=CacheConfig(block_size=4, num_blocks=64),
        parallel=ParallelConfig(executor_class="support.engine.engine_fakes.FakeExecutor"),
        engine_port=0,
    )
    proc = EngineCoreProc(config, HOST)
    thread = threading.Thread(target=proc.run)
    thread.start()
    try:
        eventually(lambda: proc.readiness().ok, "the engine to be ready", DEADLINE_S)
        proc.run_admin_call("sleep", {"level": ["1"]})
        proc.run_admin_call("wake_up", {})
        ready = proc.readiness()
        assert (ready.ok, ready.body.reason) == (True, "Ready")
        assert ready.body.resumed_s is not None
        assert time.monotonic() - ready.body.resumed_s >= woken_at > 0
    finally:
        proc.request_shutdown()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
