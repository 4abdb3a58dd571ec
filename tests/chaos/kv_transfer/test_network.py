"""The network between two engines silently drops packets and recovers: namespaces, UCX over TCP.

The tests need root, and are skipped without it.
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
DECODE = {"pull": 1, "push": 2}  # these numbers and PREFILL are indices of namespaces
CUT_S = 2 * LEASE_S


class MidTransfer:
    """Matches a publish after the first blocks were received, so that UCX is connected."""

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
class Separated:
    pair: Pair
    net: Namespaces

    async def assert_works(self, mode: str) -> None:
        """Check a request without faults, after TCP has resent what a fault dropped."""
        await asyncio.to_thread(self.net.wait_until_resent)
        await self.pair.assert_works(mode)


@pytest.fixture(scope="module")
def separated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separated]:
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
        yield Separated(pair, net)
        pair.proxy.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", ENGINE_POINTS)
async def test_an_unreachable_prefill_engine_does_not_delay_requests(
    separated: Separated, point: str, mode: str
) -> None:
    pair, prompt = separated.pair, new_prompt()
    trigger = at(pair, point, mode, lambda: separated.net.cut(PREFILL))
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                answer = await clients.hand_off(prompt)
                await trigger.reached(point)
                pair.assert_right(prompt, answer, f"{mode}, {point}")
                await pair.assert_clean(pair.decoders[mode])
    finally:
        separated.net.heal()
    await pair.assert_clean(pair.prefill)
    await separated.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", ["before_handshake", "mid_transfer", "after_last_byte"])
async def test_a_decode_engine_cut_off_for_longer_than_the_lease_gives_the_right_tokens(
    separated: Separated, point: str, mode: str
) -> None:
    pair, prompt = separated.pair, new_prompt()
    trigger = at(pair, point, mode, lambda: separated.net.cut(DECODE[mode]))
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                request = asyncio.create_task(clients.hand_off(prompt))
                await trigger.reached(point)
                await pair.assert_clean(pair.prefill)
                await trigger.sleep_until_after(CUT_S)
                separated.net.heal()
                pair.assert_right(prompt, await request, f"{mode}, {point}")
    finally:
        separated.net.heal()
    await pair.assert_clean(pair.prefill, pair.decoders[mode])
    await separated.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", ["subscribed", "mid_transfer"])
async def test_blocks_are_recomputed_if_only_messages_arrive(
    separated: Separated, point: str, mode: str
) -> None:
    """The side channel goes through the test's proxy, which both engines still reach."""
    pair, prompt, decode = separated.pair, new_prompt(), separated.pair.decoders[mode]
    before = decode.metric("baton:prompt_tokens_remote_total")
    trigger = at(pair, point, mode, separated.net.part)
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                answer = await clients.hand_off(prompt)
                await trigger.reached(point)
                pair.assert_right(prompt, answer, f"{mode}, {point}")
                assert decode.metric("baton:prompt_tokens_remote_total") < before + PROMPT_TOKENS
                await pair.assert_clean(pair.prefill, decode)
    finally:
        separated.net.heal()
    await separated.assert_works(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_interface_is_used_again_after_it_was_down(
    separated: Separated, side: str, mode: str
) -> None:
    pair, prompt = separated.pair, new_prompt()
    where = PREFILL if side == "prefill" else DECODE[mode]
    trigger = at(pair, "mid_transfer", mode, lambda: separated.net.unplug(where))
    try:
        with pair.middle(trigger):
            async with pair.clients(mode) as clients:
                request = asyncio.create_task(clients.hand_off(prompt))
                await trigger.reached("mid_transfer")
                if side == "decode":
                    await trigger.sleep_until_after(CUT_S)
                    separated.net.heal()
                pair.assert_right(prompt, await request, f"{mode}, {side}")
    finally:
        separated.net.heal()
    await pair.assert_clean(pair.prefill, pair.decoders[mode])
    await separated.assert_works(mode)
