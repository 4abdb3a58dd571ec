"""Both sides of the KV hand-off in the scheduler."""

from __future__ import annotations

import pytest

from baton_protocol.block_hash import hash_block, root_hash
from baton_protocol.engine_messages import (
    ErrorCode,
    FinishReason,
    KVSide,
    KVTransferParams,
    PrefillResult,
)
from support.engine.scheduling.block_hashes import hash_blocks
from support.engine.scheduling.fake_runner import VOCAB_SIZE, continuation, next_token
from support.engine.scheduling.scheduler_engine import BLOCK, Engine


def produce(transfer_id: str) -> KVTransferParams:
    return KVTransferParams(KVSide.PRODUCE, transfer_id, "decode-1")


def consume(transfer_id: str) -> KVTransferParams:
    return KVTransferParams(KVSide.CONSUME, transfer_id, "prefill-1", "127.0.0.1", 5558)


def hand_off(engine: Engine, transfer_id: str, request_id: str, prompt: list[int]) -> None:
    """End the load of a transfer, and send the result of its prefill stage."""
    engine.load(transfer_id, prompt)
    engine.scheduler.add_prefill_result(PrefillResult(request_id, [next_token(prompt)]))


def test_a_producer_publishes_blocks_per_chunk_and_keeps_them_until_fetched() -> None:
    engine = Engine(budget=6)
    prompt = list(range(1, 11))
    engine.add("r", prompt, 1, kv_transfer=produce("t"))
    saves = []
    for _ in range(2):
        step = engine.step()
        saves += step.connector.saves
    assert engine.connector.offers == {"t": "decode-1"}
    assert [(s.first_block_index, len(s.block_ids), s.num_tokens, s.last) for s in saves] == [
        (0, 1, 4, False),
        (1, 2, 10, True),
    ]
    full = hash_blocks(root_hash("model"), prompt, BLOCK)
    assert [*saves[0].block_hashes, *saves[1].block_hashes] == [
        *full,
        hash_block(full[-1], [9, 10]),
    ]
    assert engine.last("r").finish_reason is FinishReason.LENGTH
    assert engine.kv.pool.num_free_blocks == 29
    assert engine.scheduler.stats().num_unfinished == 1
    engine.connector.end_send("t")
    engine.run()
    assert engine.kv.pool.num_free_blocks == 32
    assert engine.scheduler.stats().num_unfinished == 0


def test_blocks_from_the_prefix_cache_are_published_with_the_first_step() -> None:
    engine = Engine()
    engine.add("first", list(range(1, 11)))
    engine.run()
    engine.add("r", list(range(1, 11)), 1, kv_transfer=produce("t"))
    (save,) = engine.step().connector.saves
    assert (save.first_block_index, len(save.block_ids), save.last) == (0, 3, True)


def test_an_aborted_producer_keeps_its_blocks_until_the_transfer_ends() -> None:
    engine = Engine(budget=4)
    engine.add("r", list(range(1, 11)), 1, kv_transfer=produce("t"))
    engine.step()
    engine.scheduler.abort_requests(["r"])
    engine.run()
    assert engine.last("r").finish_reason is FinishReason.ABORT
    assert engine.connector.cancelled == {"t"}
    assert engine.kv.pool.num_free_blocks == 29
    engine.connector.end_send("t")
    engine.run()
    assert engine.kv.pool.num_free_blocks == 32


@pytest.mark.parametrize("first", ["load", "result"])
def test_a_consumer_continues_after_the_peers_first_token_without_recomputing(first) -> None:
    engine = Engine()
    prompt = list(range(1, 11))
    engine.add("r", prompt, 5, kv_transfer=consume("t"))
    engine.step()
    token = next_token(prompt)
    for event in [first, "load" if first == "result" else "result"]:
        engine.run()
        assert engine.outputs == {}
        if event == "load":
            engine.load("t", prompt)
        else:
            engine.scheduler.add_prefill_result(PrefillResult("r", [token]))
    engine.run()
    assert engine.outputs["r"][0].token_offset == 1
    assert [token, *engine.text("r")] == continuation(prompt, 5, ignore_eos=True)
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_remote, stats.prompt_tokens) == (
        0,
        10,
        10,
    )
    assert stats.kv_transfer_recomputed_tokens == 0
    assert engine.kv.pool.num_free_blocks == 32


def test_blocks_that_did_not_arrive_are_recomputed() -> None:
    engine = Engine()
    prompt = list(range(1, 11))
    engine.add("r", prompt, 3, kv_transfer=consume("t"))
    engine.step()
    engine.scheduler.add_prefill_result(PrefillResult("r", [], "prefill died"))
    engine.step()
    assert engine.connector.cancelled == {"t"}
    engine.load("t", prompt, num_valid=1, error="peer gone")
    engine.run()
    assert engine.outputs["r"][0].token_offset == 0
    assert engine.text("r") == continuation(prompt, 3, ignore_eos=True)
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_remote) == (6, 4)
    assert stats.kv_transfer_recomputed_tokens == 6


def test_the_fail_policy_ends_the_request_with_a_kv_load_error() -> None:
    engine = Engine(fail=True)
    engine.add("r", list(range(1, 11)), 3, kv_transfer=consume("t"))
    engine.step()
    engine.connector.end_load("t", 1, "checksum mismatch")
    engine.scheduler.add_prefill_result(PrefillResult("r", [7]))
    engine.run()
    assert engine.last("r").error_code is ErrorCode.KV_LOAD
    assert "checksum mismatch" in engine.last("r").error
    assert engine.kv.pool.num_free_blocks == 32


def test_an_aborted_consumer_frees_its_blocks_after_the_load_ends() -> None:
    engine = Engine()
    engine.add("r", list(range(1, 11)), 3, kv_transfer=consume("t"))
    engine.step()
    engine.scheduler.abort_requests(["r"])
    engine.run()
    assert engine.connector.cancelled == {"t"}
    assert engine.kv.pool.num_free_blocks == 29
    engine.connector.end_load("t", 0, "cancelled")
    engine.run()
    assert engine.kv.pool.num_free_blocks == 32


def test_a_consumer_with_all_blocks_cached_still_starts_and_ends_a_load() -> None:
    engine = Engine()
    prompt = list(range(1, 9))
    engine.add("first", prompt)
    engine.run()
    engine.add("r", prompt, 3, kv_transfer=consume("t"))
    (load,) = engine.step().connector.loads
    assert (load.first_block_index, load.block_ids) == (2, [])
    engine.connector.end_load("t")
    engine.scheduler.add_prefill_result(PrefillResult("r", [next_token(prompt)]))
    engine.run()
    assert engine.outputs["r"][0].num_cached_tokens == 8
    assert engine.scheduler.stats().prompt_tokens_computed == 8  # by the first request


def test_requests_that_wait_for_remote_kv_do_not_block_others() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("remote", list(range(1, 11)), 3, kv_transfer=consume("t"))
    engine.add("local", [1, 2, 3], 3)
    engine.run()
    assert engine.last("local").finish_reason is FinishReason.LENGTH
    assert engine.scheduler.stats().num_requests_waiting_for_remote_kv == 1


def test_a_late_prefill_result_is_not_applied_to_a_later_request_with_the_same_id() -> None:
    engine = Engine()
    prompt = list(range(1, 11))
    engine.add("r", prompt, 5, kv_transfer=consume("t1"))
    engine.scheduler.abort_requests(["r"])
    engine.scheduler.add_prefill_result(PrefillResult("r", [VOCAB_SIZE - 1]))
    engine.add("r", prompt, 5, kv_transfer=consume("t2"))
    engine.step()
    engine.load("t2", prompt)
    engine.connector.end_load("t1", 0)
    engine.run()
    assert (
        engine.scheduler.stats().num_requests_waiting_for_remote_kv == 1
    )  # waits for its own result
    engine.scheduler.add_prefill_result(PrefillResult("r", [next_token(prompt)]))
    engine.run()
    assert engine.text("r") == continuation(prompt, 5, ignore_eos=True)[1:]


def test_a_prefill_token_that_reaches_max_tokens_ends_the_request() -> None:
    engine = Engine()
    prompt = list(range(1, 11))
    engine.add("r", prompt, 1, kv_transfer=consume("t"))
    engine.step()
    hand_off(engine, "t", "r", prompt)
    engine.run()
    assert engine.text("r") == []
    assert (engine.last("r").finish_reason, engine.last("r").token_offset) == (
        FinishReason.LENGTH,
        1,
    )
    assert engine.kv.pool.num_free_blocks == 32


def test_loaded_requests_do_not_take_the_slot_of_an_earlier_waiting_one() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("running", [9], 6, arrival_time=0.0)
    engine.step()
    engine.add("plain", [1, 2, 3], 2, arrival_time=1.0)
    prompts = {f"t{n}": [n + 2] * 6 for n in range(3)}
    for number, (transfer_id, prompt) in enumerate(prompts.items()):
        engine.add(
            transfer_id, prompt, 3, kv_transfer=consume(transfer_id), arrival_time=2.0 + number
        )
        engine.step()
        hand_off(engine, transfer_id, transfer_id, prompt)
    engine.run()
    assert list(engine.outputs) == ["running", "plain", "t0", "t1", "t2"]
    assert engine.text("plain") == continuation([1, 2, 3], 2, ignore_eos=True)


def test_later_loads_do_not_take_the_memory_of_an_earlier_waiting_request() -> None:
    engine = Engine(num_blocks=8, max_num_seqs=1)
    engine.add("running", [9], 6, arrival_time=0.0)
    engine.step()
    engine.add("plain", list(range(1, 14)), 2, arrival_time=1.0)  # 4 blocks
    for number in range(4):  # 2 blocks each
        engine.add(
            f"t{number}",
            [number + 2] * 6,
            3,
            kv_transfer=consume(f"t{number}"),
            arrival_time=2.0 + number,
        )
    engine.run()
    assert engine.last("plain").finish_reason is FinishReason.LENGTH
    assert engine.scheduler.stats().num_preemptions == 0
    assert len(engine.connector.loads) >= 3, (
        "later loads get the memory when the earlier request has run"
    )


def test_loads_leave_one_block_to_each_decoding_or_loaded_request() -> None:
    engine = Engine(num_blocks=12, max_num_seqs=8)
    engine.add("running", [9], 16, arrival_time=0.0)  # 5 blocks in the end
    engine.step()
    # Each needs 2 blocks at first and 3 in the end.
    prompts = {f"t{number}": [number + 2] * 6 for number in range(5)}
    for number, (transfer_id, prompt) in enumerate(prompts.items()):
        engine.add(
            transfer_id, prompt, 4, kv_transfer=consume(transfer_id), arrival_time=1.0 + number
        )
    step = engine.step()
    assert list(engine.connector.loads) == ["t0", "t1", "t2"], (
        "a fourth load would leave 3 blocks to 5 requests"
    )
    assert list(step.connector.waits) == ["t3", "t4"], "their producers are notified once"
    assert not engine.step().connector
    for transfer_id in list(prompts)[:3]:
        hand_off(engine, transfer_id, transfer_id, prompts[transfer_id])
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert list(engine.connector.loads) == ["t3", "t4"], (
        "waiting loads start when others have ended"
    )


def test_recomputing_the_last_token_does_not_write_into_a_shared_block() -> None:
    engine = Engine()
    prompt = list(range(1, 9))
    engine.add("first", prompt, 20)
    engine.step()
    engine.step()
    shared = engine.scheduler.state.requests["first"].block_ids[:2]
    before = engine.runner.memory[shared[1], 3]
    engine.add("r", prompt, 3, kv_transfer=consume("t"))
    engine.step()
    engine.connector.end_load("t")
    engine.scheduler.add_prefill_result(PrefillResult("r", [], "prefill died"))
    engine.run()
    assert engine.text("r") == continuation(prompt, 3, ignore_eos=True)
    assert engine.runner.memory[shared[1], 3] is before
    assert engine.kv.pool.num_free_blocks == 32


@pytest.mark.parametrize(
    ("params", "max_tokens", "num_blocks"), [({}, 16, 5), ({"beam_width": 2}, 16, 6)]
)
def test_a_loaded_request_that_waits_is_preempted_for_an_earlier_running_one(
    params, max_tokens, num_blocks
) -> None:
    engine = Engine(num_blocks=num_blocks, max_num_seqs=2 if params else 1)
    engine.add("running", [9], max_tokens, params, arrival_time=0.0)
    engine.step()
    prompt = [2] * 6
    engine.add("r", prompt, 3, kv_transfer=consume("t"), arrival_time=1.0)
    engine.step()
    hand_off(engine, "t", "r", prompt)
    engine.run()
    assert list(engine.outputs) == ["running", "r"]
    assert engine.last("running").finish_reason is FinishReason.LENGTH
    assert engine.text("r") == continuation(prompt, 3, ignore_eos=True)[1:]
    assert engine.scheduler.stats().num_preemptions == 1
    assert not any(output.events for output in engine.outputs["running"][1:]), (
        "the earlier request was preempted"
    )
    assert engine.kv.num_free_blocks == num_blocks


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.parametrize("params", [{}, {"beam_width": 2}])
def test_a_request_that_needs_blocks_held_by_a_transfer_waits_without_preemptions(
    preemption_mode, params
) -> None:
    engine = Engine(
        num_blocks=8, num_swap_blocks=8, preemption_mode=preemption_mode, prefix_caching=False
    )
    # Holds four of the eight blocks until they are fetched.
    engine.add("p", list(range(1, 17)), 1, kv_transfer=produce("t"))
    engine.step()
    engine.add("r", list(range(1, 9)), 12, params)  # five blocks, and more for beams
    for _ in range(40):
        engine.step()
    assert not engine.scheduler.made_progress, (
        "the request is preempted and resumed without progress"
    )
    assert engine.scheduler.stats().num_preemptions <= 2
    engine.connector.end_send("t")
    engine.run()
    assert len(engine.text("r")) == 12
    assert engine.kv.num_free_blocks == 8
