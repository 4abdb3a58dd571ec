"""Engine processes over real sockets: deaths as clients see them, signals, pause and sleep."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from baton_protocol.engine_client.engine_client import EngineClient, EngineDeadError
from baton_protocol.engine_messages import BlocksStored, ErrorCode, FinishReason, KVEventBatch
from support.engine.engine_fakes import continuation
from support.engine.engine_process import DEADLINE_S, collect, connect, request, tokens, wait_for
from support.waiting import until

DEATH_NOTICED_S = 5.0
WORKER_PROCESS = ("--executor", "support.engine.engine_fakes.WorkerProcessExecutor")
HANGS = [14, 14, 14]


async def assert_all_fail(waiting: list[asyncio.Task[object]], match: str) -> None:
    """Check that every task ends with EngineDeadError and the reason within DEATH_NOTICED_S."""
    async with asyncio.timeout(DEATH_NOTICED_S):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineDeadError), result
        assert re.search(match, str(result)), result


def add_long_requests(client: EngineClient, *prompts: list[int]) -> list[asyncio.Task[object]]:
    """Add requests that do not end within a test."""
    return [
        asyncio.create_task(collect(client.add(request(f"r{prompt}", prompt, 250))))
        for prompt in prompts
    ]


def call_and_wait(client: EngineClient) -> asyncio.Task[object]:
    """Send a utility call that is answered when the running requests have ended."""
    return asyncio.create_task(client.call("pause", "wait", timeout_s=None))


async def test_kill_9_of_the_engine_ends_every_wait_of_every_client_with_a_reason(start) -> None:
    engine = start(BATON_FAKE_STEP_S="0.2")
    async with await connect(engine, heartbeat_interval_s=0.1) as one, await connect(engine) as two:
        waiting = [*add_long_requests(one, [1], [2]), *add_long_requests(two, [3])]
        await until(lambda: one.status and one.status.num_running == 3, "three running requests")
        waiting.append(call_and_wait(two))
        while not (await one.call("get_stats"))["paused"]:  # the call has not arrived
            assert not waiting[-1].done()
        engine.process.send_signal(signal.SIGKILL)
        await assert_all_fail(waiting, "connection lost")


async def test_kill_9_of_a_worker_ends_every_wait_even_while_a_step_hangs(start) -> None:
    engine = start(*WORKER_PROCESS)
    async with await connect(engine) as one, await connect(engine) as two:
        waiting = [*add_long_requests(one, HANGS, [1]), *add_long_requests(two, [3])]
        await until(lambda: "the step hangs" in engine.text, "a hanging step", DEADLINE_S)
        waiting.append(call_and_wait(two))
        pid = int(re.search(r"worker process (\d+)", engine.text)[1])
        os.kill(pid, signal.SIGKILL)
        await assert_all_fail(waiting, f"worker 0 .pid {pid}. ended with code -9")
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 1
    assert "the crash dump is" in engine.text


async def test_a_step_that_hangs_ends_the_engine_and_its_clients_at_the_step_timeout(start) -> None:
    engine = start(*WORKER_PROCESS, "--step-timeout-s", "1")
    async with await connect(engine) as client:
        waiting = add_long_requests(client, HANGS)
        await until(lambda: "the step hangs" in engine.text, "a hanging step", DEADLINE_S)
        await assert_all_fail(waiting, r"not answered for 1 s \(parallel\.step_timeout_s\)")
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 1


async def test_kill_9_of_a_worker_of_an_idle_engine_ends_the_engine_and_its_clients(start) -> None:
    engine = start(*WORKER_PROCESS)
    async with await connect(engine) as client:
        pid = int(
            wait_for(
                lambda: re.search(r"worker process (\d+)", engine.text), "the worker's pid", engine
            )[1]
        )
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(DEATH_NOTICED_S):
            assert "worker 0" in await client.wait_dead()
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 1


async def test_a_failed_step_ends_the_engine_and_names_the_file_with_its_input(
    start, tmp_path
) -> None:
    engine = start("--crash-dump-dir", str(tmp_path / "dumps"))
    async with await connect(engine) as client:
        with pytest.raises(
            EngineDeadError, match=r"step \d+ failed: RuntimeError: the device is on fire"
        ) as dead:
            await collect(client.add(request("r", [13, 13, 13])))
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 1
    (path,) = (tmp_path / "dumps").iterdir()
    assert str(path) in str(dead.value)
    assert str(path) in engine.text
    assert "r" in json.loads(Path(path).read_text())["step"]["num_scheduled_tokens"]


async def test_a_second_sigterm_does_not_wait_for_running_requests(start) -> None:
    engine = start("--drain-timeout-s", "60", BATON_FAKE_STEP_S="0.1")
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2], 250))
        await anext(stream)
        engine.process.send_signal(signal.SIGTERM)
        wait_for(
            lambda: "the engine shuts down" in engine.text, "the first signal in the log", engine
        )
        started = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        last = (await collect(stream))[-1]
        assert last.error_code is ErrorCode.DRAINING
        assert await asyncio.to_thread(engine.process.wait, DEADLINE_S) == 0
        assert time.monotonic() - started < 10


async def test_a_pause_that_waits_does_not_block_the_engine_loop(start) -> None:
    engine = start(BATON_FAKE_STEP_S="0.02")
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2], 30))
        await anext(stream)
        pause = call_and_wait(client)
        await asyncio.sleep(0)  # sends the pause before the next call
        assert (await client.call("get_stats"))["paused"]
        assert not pause.done()
        late = client.add(request("late", [5, 6], 4))
        assert len(tokens(await collect(stream))) == 29
        assert await pause is None
        await client.call("resume")
        assert tokens(await collect(late)) == continuation([5, 6], 4, ignore_eos=True)


async def test_sleep_and_wake_up_over_the_admin_port_keep_requests(start) -> None:
    engine = start(BATON_FAKE_STEP_S="0.01")
    async with await connect(engine) as client:
        stream = client.add(request("r", [1, 2, 3], 60))
        first = await anext(stream)
        post = asyncio.to_thread
        assert await post(engine.http, "POST", "/sleep?level=1&mode=keep") == (
            200,
            '{"result":null}',
        )
        assert await post(engine.http, "GET", "/is_sleeping") == (200, '{"result":true}')
        metrics = (await post(engine.http, "GET", "/metrics"))[1]
        assert (
            'baton:engine_sleep_state{model_name="nowhere",sleep_state="weights_offloaded"} 1.0'
            in metrics
        )
        status, body = await post(engine.http, "POST", "/resume")
        assert (status, json.loads(body)["reason"]) == (409, "Failed")
        assert "wake_up() first" in body
        assert (await post(engine.http, "POST", "/wake_up?tags=weights"))[0] == 200
        assert await post(engine.http, "GET", "/is_sleeping") == (200, '{"result":true}')
        assert (await post(engine.http, "POST", "/wake_up?tags=kv_cache,scheduling"))[0] == 200
        assert await post(engine.http, "GET", "/is_paused") == (200, '{"result":false}')
        rest = tokens(await collect(stream))
        assert [*first.new_token_ids, *rest] == continuation([1, 2, 3], 60, ignore_eos=True)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/pause?mode=nonsense", 400, "Invalid enum value 'nonsense'"),
        ("/pause?speed=3", 400, "pause takes mode, not speed"),
        ("/sleep?level=7", 400, "Invalid enum value 7"),
        ("/sleep?level=deep", 400, "level"),
        ("/wake_up?tags=gpu", 400, "tags must be some of weights"),
        ("/start_profile", 409, "--profiler-dir"),
        ("/get_stats", 404, "/sleep"),
        ("/is_paused", 404, "GET /health"),
    ],
)
def test_the_admin_port_explains_bad_calls_in_json(shared_engine, path, status, message) -> None:
    got, body = shared_engine.http("POST", path)
    assert got == status, body
    assert message in json.loads(body)["message"]


async def test_metrics_count_requests_that_a_pause_aborted(start) -> None:
    engine = start(BATON_FAKE_STEP_S="0.01")
    async with await connect(engine) as client:
        assert len(tokens(await collect(client.add(request("served", [1, 2], 5))))) == 5
        stream = client.add(request("r", [1, 2], 200))
        await anext(stream)
        await client.call("pause")
        assert (await collect(stream))[-1].finish_reason is FinishReason.ABORT
        await client.call("resume")
    metrics = engine.http("GET", "/metrics")[1]
    assert (
        'baton:request_success_total{finished_reason="abort",model_name="nowhere"} 1.0' in metrics
    )
    assert 'baton:e2e_request_latency_seconds_count{model_name="nowhere"} 1.0' in metrics
    assert 'baton:request_queue_time_seconds_count{model_name="nowhere"} 1.0' in metrics
    assert 'baton:inter_token_latency_seconds_count{model_name="nowhere"}' in metrics


async def test_subscribers_receive_kv_events_without_gaps(start) -> None:
    engine = start("--enable-kv-events")
    early: list[KVEventBatch] = []
    late: list[KVEventBatch] = []
    async with await connect(engine, on_kv_events=early.append) as client:
        await collect(client.add(request("a", list(range(1, 10)))))
        async with (
            await connect(engine, on_kv_events=late.append) as other,
            await connect(engine) as unsubscribed,
        ):
            await collect(unsubscribed.add(request("b", list(range(20, 29)))))
            await client.call("reset_prefix_cache")
            await until(
                lambda: (
                    early
                    and late
                    and early[-1] == late[-1]
                    and "Cleared" in str(early[-1].events[-1])
                ),
                "the last event at both subscribers",
                DEADLINE_S,
            )
            assert other.dead_reason is None
    assert [batch.sequence for batch in early] == list(range(len(early)))
    assert [batch.sequence for batch in late] == list(range(len(early) - len(late), len(early)))
    stored = [event for batch in early for event in batch.events if isinstance(event, BlocksStored)]
    assert sum(len(event.block_hashes) for event in stored) >= 4
    assert {event.block_size for event in stored} == {4}


def test_a_max_model_len_beyond_the_kv_memory_is_fatal_with_both_numbers(start) -> None:
    engine = start("--max-model-len", "300")
    assert engine.process.wait(DEADLINE_S) == 78
    last = engine.text.splitlines()[-1]
    assert re.match(
        r"FATAL KVMemoryTooSmall: model\.max_model_len is 300 tokens, but the KV memory holds 256 ",
        last,
    ), last
