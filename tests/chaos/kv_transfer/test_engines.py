"""SIGKILL and SIGSTOP of either engine at every point of a hand-off.

The tokens are right or the error is clear, and no state is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_kv_transfer import side_channel
from baton_protocol.engine_messages import ErrorCode
from support.chaos.kv_pair import (
    LEASE_S,
    At,
    AtPush,
    Pair,
    freeze,
    is_first_publish,
    is_message,
    kill,
    new_prompt,
    start_pair,
    thaw,
)
from support.kv_transfer.side_channel_proxy import Passing, Verdict
from support.pods import pods

pytestmark = pytest.mark.chaos
FROZEN_S = 2 * LEASE_S
MODES = ("pull", "push")
#: Name -> the message at which the test acts, and what the proxy does with that message.
POINTS: dict[str, tuple[Callable[[str], Callable[[Passing], bool]], Verdict]] = {
    "before_handshake": (lambda mode: is_message(side_channel.Hello), Verdict.PASS),
    "after_metadata": (lambda mode: is_message(side_channel.Description), Verdict.PASS),
    "mid_transfer": (lambda mode: is_first_publish, Verdict.PASS),
    "after_last_byte": (lambda mode: is_message(side_channel.Release), Verdict.PASS),
    "before_notification": (
        lambda mode: is_message(side_channel.Released if mode == "push" else side_channel.Release),
        Verdict.HOLD,
    ),
}


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pods(tmp_path_factory.mktemp("kv"), 31) as group:
        started = start_pair(group, checkpoint, {mode: {"mode": mode} for mode in MODES})
        yield started
        started.proxy.close()


def at(pair: Pair, point: str, mode: str, act: Callable[[], None]) -> At:
    if (point, mode) == ("mid_transfer", "push"):
        return AtPush(pair.prefill, act)
    match, verdict = POINTS[point]
    return At(match(mode), act, verdict)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
async def test_a_request_survives_the_death_of_the_prefill_engine(
    pair: Pair, point: str, mode: str
) -> None:
    prompt, decode = new_prompt(), pair.decoders[mode]
    trigger = at(pair, point, mode, lambda: kill(pair.prefill))
    with pair.middle(trigger):
        async with pair.clients(mode) as clients:
            answer = await clients.hand_off(prompt)
            await trigger.reached(point)
            restart = asyncio.create_task(pair.restart(pair.prefill))
            pair.assert_right(prompt, answer, f"{mode}, {point}")
            await pair.assert_clean(decode)
            await clients.alone(on_prefill=False)
    await restart
    await pair.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
async def test_the_prefill_engine_survives_the_death_of_the_decode_engine(
    pair: Pair, point: str, mode: str
) -> None:
    decode = pair.decoders[mode]
    trigger = at(pair, point, mode, lambda: kill(decode))
    with pair.middle(trigger):
        async with pair.clients(mode) as clients:
            answer = await clients.hand_off(new_prompt())
            await trigger.reached(point)
            restart = asyncio.create_task(pair.restart(decode))
            assert "connection lost" in answer.error
            await pair.assert_clean(pair.prefill)
            await clients.alone(on_prefill=True)
    await restart
    await pair.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
async def test_a_frozen_prefill_engine_does_not_delay_requests(
    pair: Pair, point: str, mode: str
) -> None:
    prompt, decode = new_prompt(), pair.decoders[mode]
    trigger = at(pair, point, mode, lambda: freeze(pair.prefill))
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                answer = await clients.hand_off(prompt)
                await trigger.reached(point)
                pair.assert_right(prompt, answer, f"{mode}, {point}")
                await pair.assert_clean(decode)
                await clients.alone(on_prefill=False)
    finally:
        thaw(pair.prefill)
    await pair.assert_clean(pair.prefill, decode)
    await pair.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
async def test_a_decode_engine_frozen_for_longer_than_the_lease_gives_the_right_tokens(
    pair: Pair, point: str, mode: str
) -> None:
    prompt, decode = new_prompt(), pair.decoders[mode]
    trigger = at(pair, point, mode, lambda: freeze(decode))
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                request = asyncio.create_task(clients.hand_off(prompt))
                await trigger.reached(point)
                await pair.assert_clean(pair.prefill)
                await trigger.sleep_until_after(FROZEN_S)
                await clients.alone(on_prefill=True)
                thaw(decode)
                pair.assert_right(prompt, await request, f"{mode}, {point}")
    finally:
        thaw(decode)
    await pair.assert_clean(pair.prefill, decode)
    await pair.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
async def test_two_frozen_engines_resume_their_request(pair: Pair, mode: str) -> None:
    """Both engines stop and resume, like on a suspended machine."""
    prompt, decode = new_prompt(), pair.decoders[mode]

    def freeze_both() -> None:
        freeze(pair.prefill)
        freeze(decode)

    trigger = at(pair, "mid_transfer", mode, freeze_both)
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                request = asyncio.create_task(clients.hand_off(prompt))
                await trigger.reached("mid_transfer")
                await asyncio.sleep(FROZEN_S)
                thaw(decode)
                thaw(pair.prefill)
                pair.assert_right(prompt, await request, mode)
    finally:
        thaw(decode)
        thaw(pair.prefill)
    await pair.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind", [side_channel.Release, side_channel.Released, side_channel.Publish]
)
async def test_a_lost_message_costs_at_most_a_recomputation(
    pair: Pair, mode: str, kind: type[object]
) -> None:
    prompt = new_prompt()
    trigger = At(is_message(kind), lambda: None, Verdict.DROP)
    with pair.middle(trigger):
        async with pair.clients(mode) as clients:
            pair.assert_right(
                prompt, await clients.hand_off(prompt), f"{mode}, lost {kind.__name__}"
            )
            await pair.assert_clean(pair.prefill, pair.decoders[mode])
    await pair.assert_works(mode)


async def test_a_writer_that_never_confirms_is_fenced_and_its_memory_reused(
    pair: Pair,
) -> None:
    """Push mode: the request ends while blocks may still be written, and RELEASED is not sent."""
    decode, prompt = pair.decoders["push"], new_prompt()
    fences = decode.metric("baton:kv_transfer_memory_fences_total")
    trigger = AtPush(pair.prefill, lambda: freeze(pair.prefill))
    try:
        with pair.middle(trigger):
            async with pair.clients("push") as clients:
                pair.assert_right(prompt, await clients.hand_off(prompt), "never confirmed")
                await trigger.reached("mid_transfer")
                await pair.assert_clean(decode)
    finally:
        thaw(pair.prefill)
    assert decode.metric("baton:kv_transfer_memory_fences_total") == fences + 1
    await pair.assert_clean(pair.prefill, decode)
    await pair.assert_works("push")


async def test_a_lost_prefill_engine_gives_a_clear_error_with_policy_fail(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pods(tmp_path, 32) as group:
        pair = start_pair(group, checkpoint, {"fail": {"load_failure_policy": "fail"}})
        trigger = at(pair, "mid_transfer", "pull", lambda: kill(pair.prefill))
        with pair.middle(trigger):
            async with pair.clients("fail") as clients:
                answer = await clients.hand_off(new_prompt())
                assert trigger.reached_at
                assert answer.error_code is ErrorCode.KV_LOAD
                assert answer.error
                await pair.assert_clean(pair.decoders["fail"])
        await pair.restart(pair.prefill)
        await pair.assert_works("fail")
        pair.proxy.close()
