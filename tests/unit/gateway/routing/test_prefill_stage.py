"""Samples of one prompt with prefill engines: one prefill stage and one KV transfer for all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton_protocol.engine_messages import EngineCoreRequest, ErrorCode, KVSide
from support.gateway.fake_engine import busy
from support.gateway.gateway_rig import GatewayRig
from support.waiting import until

TEXT = "hello world, the quick brown fox"


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def check_group(adds: list[EngineCoreRequest], count: int) -> None:
    """Check that `adds` are one group of `count` samples, and that only the first one loads KV."""
    assert sorted(add.sample_index for add in adds) == list(range(count))
    assert len({add.group_id for add in adds} - {""}) == 1
    assert len({add.group_id for add in adds}) == 1
    assert adds[0].kv_transfer is not None
    assert adds[0].kv_transfer.side is KVSide.CONSUME
    assert [add.kv_transfer for add in adds[1:]] == [None] * (count - 1)


@pytest.mark.parametrize(("fields", "count"), [({"n": 4}, 4), ({"n": 2, "best_of": 3}, 3)])
async def test_the_samples_of_a_prompt_have_one_prefill_stage(
    rig: GatewayRig, fields: dict[str, int], count: int
) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    engines = [rig.engine(f"d{index}", "decode", TEXT) for index in range(2)]
    prefill.cached_tokens = lambda _: 1
    await rig.start(prefill, *engines)
    body = await rig.completion(seed=7, **fields)
    assert texts(body) == [TEXT] * fields["n"]
    [produce] = prefill.adds
    assert produce.kv_transfer is not None
    assert produce.kv_transfer.side is KVSide.PRODUCE
    [decode] = [engine for engine in engines if engine.adds]
    check_group(decode.adds, count)
    assert decode.adds[0].kv_transfer.transfer_id == produce.kv_transfer.transfer_id
    assert {add.sampling_params.seed for add in (produce, *decode.adds)} == {7}
    [result] = decode.prefill_results.values()
    assert (result.token_ids, result.error) == ([], ""), "the decode engine samples all tokens"
    usage, num_tokens = body["usage"], len(decode.answer)
    assert usage["prompt_tokens"] == len(produce.prompt_token_ids)
    assert usage["completion_tokens"] == count * num_tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert rig.metric("baton:prefill_stages_total", outcome="done") == 1


async def test_each_prompt_of_a_request_has_its_own_prefill_stage(rig: GatewayRig) -> None:
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    await rig.start(prefill, decode)
    assert texts(await rig.completion(prompt=["go", "on"], n=2)) == [TEXT] * 4
    assert len({tuple(add.prompt_token_ids) for add in prefill.adds}) == len(prefill.adds) == 2
    for group_id in {add.group_id for add in decode.adds}:
        check_group([add for add in decode.adds if add.group_id == group_id], 2)


async def test_samples_with_prompt_logprobs_are_a_group_without_a_prefill_stage(
    rig: GatewayRig,
) -> None:
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    await rig.start(prefill, decode)
    body = await rig.completion(prompt=[5, 6, 7], n=3, prompt_logprobs=1)
    assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [3] * 3
    assert not prefill.adds
    assert [add.kv_transfer for add in decode.adds] == [None] * 3
    assert len({add.group_id for add in decode.adds} - {""}) == 1


@pytest.mark.parametrize("how", ["refuses", "dies"])
async def test_a_failed_prefill_stage_of_a_group_is_one_fallback(rig: GatewayRig, how: str) -> None:
    prefill, decode = rig.engine("p", "prefill", TEXT), rig.engine("d", "decode", TEXT)
    if how == "refuses":
        prefill.refuse = (ErrorCode.OVERLOADED, "not now")
    prefill.die_on_add = how == "dies"
    await rig.start(prefill, decode)
    assert texts(await rig.completion(n=3)) == [TEXT] * 3
    check_group(decode.adds, 3)
    [result] = decode.prefill_results.values()
    assert result.error
    outcome = "refused" if how == "refuses" else "failed"
    assert rig.metric("baton:prefill_fallbacks_total", reason=outcome) == 1


async def test_samples_without_tokens_move_together_with_one_prefill_stage(rig: GatewayRig) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    engines = [rig.engine(f"d{index}", "decode", TEXT, hold_after=0) for index in range(3)]
    await rig.start(prefill, *engines)
    request = asyncio.create_task(rig.completion(n=3))
    first = await busy(engines, 3)
    await until(lambda: first.prefill_results, "the end of the prefill stage")
    for engine in engines:
        engine.hold_after = None
    first.die()
    assert texts(await request) == [TEXT] * 3
    [second] = [engine for engine in engines if engine is not first and engine.adds]
    check_group(second.adds, 3)
    assert len(prefill.adds) == 2


async def test_samples_with_tokens_are_resumed_without_another_prefill_stage(
    rig: GatewayRig,
) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    engines = [rig.engine(f"d{index}", "decode", TEXT, hold_after=2) for index in range(3)]
    await rig.start(prefill, *engines)
    request = asyncio.create_task(rig.completion(n=3))
    first = await busy(engines, 3)
    await until(lambda: rig.metric("baton:gateway_generation_tokens_total") == 6, "two tokens each")
    for engine in engines:
        engine.hold_after = None
    first.die()
    assert texts(await request) == [TEXT] * 3
    [second] = [engine for engine in engines if engine is not first and engine.adds]
    assert [add.generated_token_ids for add in second.adds] == [first.answer[:2]] * 3
    assert [(add.group_id, add.kv_transfer) for add in second.adds] == [("", None)] * 3
    assert len(prefill.adds) == 1


async def test_a_failed_load_moves_all_samples_to_one_other_engine(rig: GatewayRig) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    engines = [rig.engine(f"d{index}", "decode", TEXT) for index in range(4)]
    for engine in engines:
        engine.planned_errors = engines[0].planned_errors
    engines[0].planned_errors += [(0, ErrorCode.KV_LOAD)] * 3
    await rig.start(prefill, *engines)
    assert texts(await rig.completion(n=3)) == [TEXT] * 3
    used = [engine for engine in engines if engine.adds]
    assert len(used) == len(prefill.adds) == 2
    for engine in used:
        check_group(engine.adds, 3)


async def test_a_sample_that_fails_alone_has_a_prefill_stage_of_its_own(rig: GatewayRig) -> None:
    prefill = rig.engine("p", "prefill", TEXT)
    engines = [rig.engine(f"d{index}", "decode", TEXT) for index in range(2)]
    for engine in engines:
        engine.planned_errors = engines[0].planned_errors
    engines[0].planned_errors.append((0, ErrorCode.INTERNAL))
    await rig.start(prefill, *engines)
    assert texts(await rig.completion(n=3)) == [TEXT] * 3
    [alone] = next(engine for engine in engines if len(engine.adds) == 1).adds
    assert (alone.sample_index, alone.group_id) == (0, "")
    assert alone.kv_transfer is not None
    assert len(prefill.adds) == 2
