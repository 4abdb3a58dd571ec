"""Corrupted blocks, replayed or invalid messages and restarted peers never give a wrong token.

Bytes change in the memory of the engines, after the checksum is computed and before the block is
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from baton_kv_transfer import side_channel
from baton_kv_transfer.side_channel import (
    Describe,
    Description,
    Hello,
    MemoryDescription,
    Publish,
    Subscribe,
)
from baton_protocol.engine_messages import ErrorCode
from baton_protocol.options.config import KV_PORT
from support import chaos
from support.chaos.kv_pair import (
    PROMPT_TOKENS,
    At,
    Pair,
    PairClients,
    flip_bit,
    is_first_publish,
    is_message,
    kill,
    new_prompt,
    start_pair,
)
from support.kv_transfer.side_channel_proxy import Passing, SideChannelProxy, Verdict
from support.pods import Pod, pods
from support.waiting import eventually

pytestmark = pytest.mark.chaos
MODES = ("pull", "push")
DAMAGE = Path(chaos.__file__).parent / "damage"  # its sitecustomize runs in the engines


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kv-wire")
    decoders = {
        "pull": {"mode": "pull"},
        "push": {"mode": "push"},
        "fail": {"load_failure_policy": "fail"},
    }
    with pods(folder, 33) as group, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(DAMAGE))
        environment.setenv("BATON_TEST_DAMAGE", str(folder))
        started = start_pair(group, checkpoint, decoders)
        yield started
        started.proxy.close()


def failures(decode: Pod) -> float:
    return decode.metric("baton:kv_transfer_checksum_failures_total")


def remote_tokens(decode: Pod) -> float:
    return decode.metric("baton:prompt_tokens_remote_total")


class Corruption:
    """A hook that flips a bit of every published block before the consumer receives the message.

    It flips all bits at the last publish, because the prefill engine uses its blocks until then.
    """

    def __init__(self, pair: Pair, decode: Pod, *, at_producer: bool, at_consumer: bool) -> None:
        self._pair = pair
        self._decode = decode
        self._at_producer = at_producer
        self._at_consumer = at_consumer
        self._memory: dict[bool, MemoryDescription] = {}
        self._subscription: Subscribe | None = None
        self._blocks: list[side_channel.PublishedBlock] = []
        self.changed: list[tuple[Pod, int]] = []

    def __call__(self, passing: Passing) -> Verdict:
        match passing.message:
            case Describe(memory=memory) if memory is not None:
                self._memory[True] = memory
            case Description(memory=memory):
                self._memory[False] = memory
            case Subscribe():
                self._subscription = passing.message
            case Publish(blocks=blocks, last=last):
                self._blocks += blocks
                if not last:
                    return Verdict.HOLD
                for block in self._blocks:
                    if self._at_producer:
                        self._change(self._pair.prefill, self._memory[False], block.slot)
                    if self._at_consumer:
                        offset = block.index - self._subscription.first_block_index
                        self._change(
                            self._decode, self._memory[True], self._subscription.push_slots[offset]
                        )
                passing.connection.release()
        return Verdict.PASS

    def _change(self, pod: Pod, memory: MemoryDescription, slot: int) -> None:
        address = memory.base_address + slot * memory.slot_nbytes + memory.slot_nbytes // 3
        flip_bit(pod, address)
        self.changed.append((pod, address))

    def undo(self) -> None:
        """Restore the producer's blocks, which its prefix cache keeps."""
        for pod, address in self.changed:
            if pod is self._pair.prefill:
                flip_bit(pod, address)


async def hand_off_corrupted(
    pair: Pair, mode: str, *, at_producer: bool, at_consumer: bool, prompt: list[int]
) -> object:
    decode = pair.decoders[mode]
    before = failures(decode)
    corruption = Corruption(pair, decode, at_producer=at_producer, at_consumer=at_consumer)
    try:
        with pair.middle(corruption):
            async with pair.clients(mode) as clients:
                answer = await clients.hand_off(prompt)
    finally:
        corruption.undo()
    assert corruption.changed
    assert failures(decode) > before
    await pair.assert_clean(pair.prefill, decode)
    return answer


async def test_corrupted_blocks_are_recomputed(pair: Pair) -> None:
    prompt, before = new_prompt(), remote_tokens(pair.decoders["pull"])
    answer = await hand_off_corrupted(
        pair, "pull", at_producer=True, at_consumer=False, prompt=prompt
    )
    pair.assert_right(prompt, answer, "corrupted")  # type: ignore[arg-type]
    assert remote_tokens(pair.decoders["pull"]) == before
    await pair.assert_works("pull")


async def test_corrupted_blocks_fail_the_request_with_policy_fail(pair: Pair) -> None:
    answer = await hand_off_corrupted(
        pair, "fail", at_producer=True, at_consumer=False, prompt=new_prompt()
    )
    assert answer.error_code is ErrorCode.KV_LOAD  # type: ignore[attr-defined]
    await pair.assert_works("fail")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["always", "once"])
async def test_blocks_damaged_before_verification_are_read_again_or_recomputed(
    pair: Pair, mode: str, order: str
) -> None:
    """Damaged once: a second read succeeds. Damaged always: no received block is used."""
    prompt, decode = new_prompt(), pair.decoders[mode]
    remote, failed = remote_tokens(decode), failures(decode)
    request = decode.log.parent / decode.address
    request.write_text(order)
    try:
        async with pair.clients(mode) as clients:
            answer = await clients.hand_off(prompt)
    finally:
        request.unlink(missing_ok=True)
    pair.assert_right(prompt, answer, f"{mode}, damaged {order}")
    assert failures(decode) > failed
    assert remote_tokens(decode) == remote + (PROMPT_TOKENS if order == "once" else 0)
    await pair.assert_clean(pair.prefill, decode)
    await pair.assert_works(mode)


@contextlib.contextmanager
def flipping(corruption: Corruption) -> Iterator[None]:
    """Flip the corrupted bits back and forth during the block, and restore them after it."""
    stopping = threading.Event()

    def flip() -> None:
        while not stopping.is_set():
            for pod, address in list(corruption.changed):
                flip_bit(pod, address)
                flip_bit(pod, address)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        corruption.undo()


@pytest.mark.parametrize("mode", MODES)
async def test_blocks_that_change_while_they_are_read_are_not_used(pair: Pair, mode: str) -> None:
    for _ in range(5):
        prompt = new_prompt()
        corruption = Corruption(pair, pair.decoders[mode], at_producer=True, at_consumer=False)
        with flipping(corruption), pair.middle(corruption):
            async with pair.clients(mode) as clients:
                answer = await clients.hand_off(prompt)
        pair.assert_right(prompt, answer, f"{mode}, flipping bits")
    await pair.assert_works(mode)


async def test_a_restarted_prefill_engine_is_a_new_peer(pair: Pair) -> None:
    """The old description, and loads from the old instance, are refused with both instance ids."""
    decode = pair.decoders["pull"]
    with pair.middle(lambda passing: Verdict.PASS) as proxy:
        async with pair.clients("pull") as clients:
            prompt = new_prompt()
            pair.assert_right(prompt, await clients.hand_off(prompt), "before")
            old = clients.prefill_instance
        (old_description,) = proxy.messages(Description)
    kill(pair.prefill)
    await pair.restart(pair.prefill)

    def replay(passing: Passing) -> Verdict:
        if isinstance(passing.message, Description):
            passing.frame = old_description.frame
        return Verdict.PASS

    before = remote_tokens(decode)
    with pair.middle(replay) as proxy:
        async with pair.clients("pull") as clients:
            prompt = new_prompt()
            pair.assert_right(prompt, await clients.hand_off(prompt), "old description")
            assert proxy.messages(Description)
            prompt = new_prompt()
            pair.assert_right(prompt, await clients.hand_off(prompt, producer=old), "old instance")
            (refused,) = proxy.messages(side_channel.Refused)
            assert old in refused.message.reason  # type: ignore[union-attr]
            assert clients.prefill_instance in refused.message.reason  # type: ignore[union-attr]
    assert remote_tokens(decode) == before
    await pair.assert_works("pull")


async def test_a_restarted_decode_engine_is_a_new_peer(pair: Pair) -> None:
    decode = pair.decoders["pull"]
    trigger = At(is_first_publish, lambda: kill(decode))
    with pair.middle(trigger):
        async with pair.clients("pull") as clients:
            assert (await clients.hand_off(new_prompt())).error
    await pair.restart(decode)
    await pair.assert_clean(pair.prefill)
    await pair.assert_works("pull")


async def record_hand_off(
    pair: Pair, clients: PairClients, proxy: SideChannelProxy, transfer_id: str
) -> list[Passing]:
    """Return all messages of a successful hand-off."""
    prompt, before = new_prompt(), len(proxy.seen)
    pair.assert_right(prompt, await clients.hand_off(prompt, transfer_id=transfer_id), "recorded")
    return proxy.seen[before:]


@pytest.mark.parametrize("same_id", [False, True], ids=["other_transfer", "same_transfer_id"])
@pytest.mark.parametrize("mode", MODES)
async def test_replayed_messages_of_an_ended_load_are_ignored(
    pair: Pair, mode: str, same_id: bool
) -> None:
    decode, transfer_id = pair.decoders[mode], uuid.uuid4().hex
    old: list[Passing] = []

    def replay(passing: Passing) -> Verdict:
        # A transfer that is offered again may have a second subscription and release. Old messages
        # are recognized by their generation once the new generation is known.
        if is_first_publish(passing) or (isinstance(passing.message, Subscribe) and not same_id):
            for message in old:
                passing.connection.inject(message.frame, to_producer=message.to_producer)
        return Verdict.PASS

    with pair.middle(replay) as proxy:
        async with pair.clients(mode) as clients:
            seen = await record_hand_off(pair, clients, proxy, transfer_id)
            kinds = [Publish, side_channel.Release, side_channel.Released, side_channel.Heartbeat]
            if not same_id:
                kinds.append(Subscribe)
            old += [passing for passing in seen if isinstance(passing.message, tuple(kinds))]
            assert len(old) > 3
            before, prompt = remote_tokens(decode), new_prompt()
            answer = await clients.hand_off(prompt, transfer_id=transfer_id if same_id else "")
            pair.assert_right(prompt, answer, f"{mode}, replayed")
            # A reused id may be refused. The tokens are then computed.
            assert same_id or remote_tokens(decode) == before + PROMPT_TOKENS
            await pair.assert_clean(pair.prefill, decode)
    await pair.assert_works(mode)


async def test_a_replayed_handshake_gets_no_memory_description(pair: Pair) -> None:
    refused = pair.prefill.metric("baton:kv_transfer_handshakes_refused_total")
    with pair.middle(lambda passing: Verdict.PASS) as proxy:
        async with pair.clients("pull") as clients:
            prompt = new_prompt()
            pair.assert_right(prompt, await clients.hand_off(prompt), "recorded")
        frames = [
            passing.frame for passing in proxy.seen if isinstance(passing.message, Hello | Describe)
        ]
        assert len(frames) == 2
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{pair.prefill.address}:{KV_PORT}")
        answers = []
        for frame in frames:
            dealer.send(frame)
            assert dealer.poll(5000)
            answers.append(side_channel.decode_to_consumer(dealer.recv()))
    assert [type(answer) for answer in answers] == [side_channel.Welcome, side_channel.Refused]
    name = "baton:kv_transfer_handshakes_refused_total"
    await asyncio.to_thread(
        eventually,
        lambda: pair.prefill.metric(name) == refused + 1,
        timeout_s=5,
        what="the refusal is counted",
    )
    await pair.assert_works("pull")


def altering(change: Callable[[Publish], Publish]) -> Callable[[Passing], Verdict]:
    def hook(passing: Passing) -> Verdict:
        if isinstance(passing.message, Publish) and passing.message.blocks:
            passing.frame = side_channel.encode(change(passing.message))
        return Verdict.PASS

    return hook


def with_blocks(publish: Publish, **fields: int) -> Publish:
    blocks = [msgspec.structs.replace(block, **fields) for block in publish.blocks]
    return msgspec.structs.replace(publish, blocks=blocks)


INVALID: dict[str, Callable[[Passing], Verdict]] = {
    "slot_below_zero": altering(lambda publish: with_blocks(publish, slot=-1)),
    "slot_far_out": altering(lambda publish: with_blocks(publish, slot=2**62)),
    "slot_of_another_block": altering(
        lambda publish: with_blocks(publish, slot=publish.blocks[0].slot ^ 1)
    ),
    "index_below_zero": altering(lambda publish: with_blocks(publish, index=-(2**63))),
    "checksum_too_long": altering(lambda publish: with_blocks(publish, checksum=2**64 - 1)),
    "last_too_early": altering(lambda publish: msgspec.structs.replace(publish, last=True)),
    "not_a_message": altering(lambda publish: publish),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INVALID)
async def test_invalid_messages_of_a_producer_cost_a_recomputation(
    pair: Pair, mode: str, name: str
) -> None:
    prompt, hook = new_prompt(), INVALID[name]
    if name == "not_a_message":

        def hook(passing: Passing) -> Verdict:
            if is_message(Publish)(passing):
                passing.frame = passing.frame[:-3] + b"\xc1\xc1\xc1"
            return Verdict.PASS

    with pair.middle(hook):
        async with pair.clients(mode) as clients:
            pair.assert_right(prompt, await clients.hand_off(prompt), f"{mode}, {name}")
            await pair.assert_clean(pair.prefill, pair.decoders[mode])
    await pair.assert_works(mode)


async def test_many_requests_survive_repeated_connection_resets(pair: Pair) -> None:
    async with pair.clients("pull") as one, pair.clients("push") as two:
        prompts = [new_prompt() for _ in range(8)]
        requests = [
            asyncio.create_task((one, two)[i % 2].hand_off(prompt))
            for i, prompt in enumerate(prompts)
        ]
        while not all(task.done() for task in requests):
            await asyncio.wait(requests, timeout=0.1)
            pair.proxy.reset()
        for prompt, task in zip(prompts, requests, strict=True):
            pair.assert_right(prompt, task.result(), "connection resets")
    for mode in MODES:
        await pair.assert_works(mode)
