"""The network between two engines goes away, with no word to anybody, and comes back: namespaces, UCX over TCP.

Needs root; elsewhere the tests are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton_kv_transfer import side_channel
from support.chaos.kv_pair import (
    LEASE_S,
    PROMPT_TOKENS,
    At,
    AtPush,
    Pair,
    is_message,
    new_prompt,
    start_pair,
)
from support.chaos.namespaces import Namespaces, namespaces
from support.kv_transfer.side_channel_proxy import Passing
from support.pods import Pod, pods
from support.waiting import eventually

pytestmark = pytest.mark.chaos
MODES = ("pull", "push")
PREFILL = 0
DECODE = {"pull": 1, "push": 2}
"""Which namespace is whose."""
CUT_S = 2 * LEASE_S


class MidTransfer:
    """Some blocks are there, so UCX is connected; more are published."""

    def __init__(self, decode: Pod) -> None:
        self._decode = decode
        self._wait = True
        self._before = self._received()

    def __call__(self, passing: Passing) -> bool:
        if not isinstance(passing.message, side_channel.Publish) or _has_first_block(passing):
            return False
        if self._wait:
            eventually(
                lambda: self._received() > self._before,
                timeout_s=5,
                what="the first blocks",
                every_s=0.01,
            )
            self._wait = False
        return True

    def _received(self) -> float:
        return self._decode.metric("baton:kv_transfer_blocks_received_total")


def _has_first_block(passing: Passing) -> bool:
    return isinstance(passing.message, side_channel.Publish) and any(
        block.index == 0 for block in passing.message.blocks
    )


POINTS: dict[str, Callable[[Pod], Callable[[Passing], bool]]] = {
    "before_handshake": lambda decode: is_message(side_channel.Hello),
    "after_metadata": lambda decode: is_message(side_channel.Description),
    "subscribed": lambda decode: is_message(side_channel.Subscribe),
    "mid_transfer": MidTransfer,
    "after_last_byte": lambda decode: is_message(side_channel.Release),
}


ENGINE_POINTS = ("before_handshake", "after_metadata", "mid_transfer", "after_last_byte")


def at(pair: Pair, point: str, mode: str, act: Callable[[], None]) -> At:
    if (point, mode) == ("mid_transfer", "push"):
        return AtPush(pair.prefill, act)
    return At(POINTS[point](pair.decoders[mode]), act)


@dataclass
class Apart:
    pair: Pair
    net: Namespaces


@pytest.fixture(scope="module")
def apart(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
    with (
        namespaces(3, environment) as net,
        pods(tmp_path_factory.mktemp("kv-network"), 34) as group,
    ):
        pair = start_pair(
            group,
            checkpoint,
            {mode: {"mode": mode} for mode in MODES},
            networks=net.networks,
            proxy_host=net.host,
        )
        yield Apart(pair, net)
        pair.proxy.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", ENGINE_POINTS)
async def test_a_prefill_engine_that_cannot_be_reached_holds_up_nobody(
    apart: Apart, point: str, mode: str
) -> None:
    pair, prompt = apart.pair, new_prompt()
    trigger = at(pair, point, mode, lambda: apart.net.cut(PREFILL))
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                answer = await clients.hand_off(prompt)
                await trigger.reached(point)
                pair.assert_right(prompt, answer, f"{mode}, {point}")
                await pair.assert_clean(pair.decoders[mode])
    finally:
        apart.net.heal()
    await pair.assert_clean(pair.prefill)
    await pair.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", ["before_handshake", "mid_transfer", "after_last_byte"])
async def test_a_decode_engine_cut_off_for_longer_than_the_lease_ends_its_request_right(
    apart: Apart, point: str, mode: str
) -> None:
    pair, prompt = apart.pair, new_prompt()
    trigger = at(pair, point, mode, lambda: apart.net.cut(DECODE[mode]))
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                asked = asyncio.create_task(clients.hand_off(prompt))
                await trigger.reached(point)
                await pair.assert_clean(pair.prefill)
                await asyncio.sleep(
                    max(0.0, CUT_S + trigger.reached_at - asyncio.get_running_loop().time())
                )
                apart.net.heal()
                pair.assert_right(prompt, await asked, f"{mode}, {point}")
    finally:
        apart.net.heal()
    await pair.assert_clean(pair.prefill, pair.decoders[mode])
    await pair.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", ["subscribed", "mid_transfer"])
async def test_blocks_that_do_not_come_while_messages_do_are_recomputed(
    apart: Apart, point: str, mode: str
) -> None:
    """The side channel goes through the test, which both still reach."""
    pair, prompt, decode = apart.pair, new_prompt(), apart.pair.decoders[mode]
    before = decode.metric("baton:prompt_tokens_remote_total")
    trigger = at(pair, point, mode, apart.net.part)
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                answer = await clients.hand_off(prompt)
                await trigger.reached(point)
                pair.assert_right(prompt, answer, f"{mode}, {point}")
                assert decode.metric("baton:prompt_tokens_remote_total") < before + PROMPT_TOKENS
                await pair.assert_clean(pair.prefill, decode)
    finally:
        apart.net.heal()
    await pair.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_interface_that_goes_down_and_comes_back_is_used_again(
    apart: Apart, side: str, mode: str
) -> None:
    pair, prompt = apart.pair, new_prompt()
    where = PREFILL if side == "prefill" else DECODE[mode]
    trigger = at(pair, "mid_transfer", mode, lambda: apart.net.unplug(where))
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                asked = asyncio.create_task(clients.hand_off(prompt))
                await trigger.reached("mid_transfer")
                if side == "decode":
                    await asyncio.sleep(
                        max(0.0, CUT_S + trigger.reached_at - asyncio.get_running_loop().time())
                    )
                    apart.net.heal()
                pair.assert_right(prompt, await asked, f"{mode}, {side}")
    finally:
        apart.net.heal()
    await pair.assert_clean(pair.prefill, pair.decoders[mode])
    await pair.assert_works(mode)
