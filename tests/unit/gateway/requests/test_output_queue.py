"""Outputs that wait for a client are kept in compact form, and none is lost."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.requests.job import Choice
from baton_gateway.requests.output_queue import (
    MAX_JOINED_TOKENS,
    MAX_SINGLE_OUTPUTS,
    CollectedOutput,
    OutputQueue,
)
from baton_protocol.engine_messages import TokenLogprobs
from baton_text.output import OutputProcessor, TextOutput
from baton_text.reply_parsing.reply_parser import ReplyDelta
from baton_text.reply_parsing.tool_formats import ToolCallDelta


def make_choice(index: int) -> Choice:
    return Choice(index, cast(OutputProcessor, None), [])  # the queue uses the index only


def make_output(number: int) -> TextOutput:
    logprobs = [TokenLogprobs(number, -0.5 * number, 1, [(number, -0.5 * number)])]
    return TextOutput(f"{number} ", [number], logprobs)


def total(outputs: list[TextOutput]) -> tuple[str, list[int], list[TokenLogprobs]]:
    return (
        "".join(output.text for output in outputs),
        [token_id for output in outputs for token_id in output.token_ids],
        [item for output in outputs for item in output.logprobs],
    )


@given(st.lists(st.one_of(st.integers(0, 2), st.none()), max_size=400))
def test_a_queue_loses_and_reorders_nothing(steps: list[int | None]) -> None:
    """A number puts an output of this choice, and None takes an event."""

    async def run() -> None:
        queue = OutputQueue()
        choices = [make_choice(index) for index in range(3)]
        put: list[list[TextOutput]] = [[], [], []]
        got: list[list[TextOutput]] = [[], [], []]

        async def take() -> None:
            event = await queue.get()
            assert event is not None
            choice, output = event
            assert len(output.token_ids) <= MAX_JOINED_TOKENS
            got[choice.index].append(output)

        for number, step in enumerate(steps):
            if step is not None:
                put[step].append(make_output(number))
                queue.put(choices[step], put[step][-1])
            elif queue.num_outputs:
                await take()
            waiting = sum(map(len, put)) - sum(
                len(each.token_ids) for every in got for each in every
            )
            assert queue.num_outputs == waiting
            assert queue.num_logprobs == 2 * waiting
        queue.end_sequence()
        while queue.num_outputs:
            await take()
        assert await queue.get() is None
        assert [total(outputs) for outputs in got] == [total(outputs) for outputs in put]

    asyncio.run(run())


async def test_a_client_that_keeps_up_receives_each_output_alone() -> None:
    queue, choice = OutputQueue(), make_choice(0)
    outputs = [make_output(number) for number in range(MAX_SINGLE_OUTPUTS)]
    for output in outputs:
        queue.put(choice, output)
    assert [await queue.get() for _ in outputs] == [(choice, output) for output in outputs]


async def test_the_parts_of_a_reply_stay_in_their_order() -> None:
    queue, choice = OutputQueue(), make_choice(0)
    call = ToolCallDelta(0, name="f", arguments="{}")
    parts = [
        *[ReplyDelta(content=f"{number}") for number in range(MAX_SINGLE_OUTPUTS)],
        ReplyDelta(reasoning="r"),
        ReplyDelta(content="a"),
        ReplyDelta(tool_calls=[call]),
        ReplyDelta(content="b"),
        ReplyDelta(reasoning="s"),
    ]
    for part in parts:
        queue.put(choice, TextOutput(reply=part))
    received = []
    while queue.num_outputs:
        event = await queue.get()
        assert event is not None
        received.append(event[1].reply)
    assert received[MAX_SINGLE_OUTPUTS:] == [
        ReplyDelta("r", "a", [call]),
        ReplyDelta(content="b"),
        ReplyDelta(reasoning="s"),
    ]


async def test_a_failure_follows_the_outputs_before_it() -> None:
    queue, choice = OutputQueue(), make_choice(0)
    for number in range(2 * MAX_SINGLE_OUTPUTS):
        queue.put(choice, make_output(number))
    queue.fail(ValueError("lost"))
    while queue.num_outputs:
        await queue.get()
    with pytest.raises(ValueError, match="lost"):
        await queue.get()


@pytest.mark.parametrize(("num_top", "share"), [(0, 2), (20, 5)])
def test_the_outputs_of_a_whole_response_are_kept_in_compact_form(num_top: int, share: int) -> None:
    def outputs() -> Iterator[TextOutput]:
        for number in range(1000, 6000):
            top = [(number + place, -1.5 * number) for place in range(num_top)]
            logprobs = [TokenLogprobs(number, -0.5 * number, 1, top)] if top else []
            text = f"text {number}"
            yield TextOutput(text, [number], logprobs, reply=ReplyDelta(content=text))

    def collect() -> CollectedOutput:
        collected = CollectedOutput()
        for output in outputs():
            collected.add(output)
        return collected

    assert memory_of(collect) * share < memory_of(lambda: list(outputs()))
    whole = collect().output()
    assert whole.text == "".join(output.text for output in outputs())
    assert whole.reply == ReplyDelta(content=whole.text)
    assert whole.token_ids == list(range(1000, 6000))
    assert whole.logprobs == [item for output in outputs() for item in output.logprobs]


def memory_of(make: Callable[[], object]) -> int:
    """Return the bytes of what `make` returns."""
    tracemalloc.start()
    try:
        made = make()
        num_bytes, _ = tracemalloc.get_traced_memory()
        del made
        return num_bytes
    finally:
        tracemalloc.stop()


async def test_other_work_runs_while_a_client_reads_a_backlog() -> None:
    queue, choice = OutputQueue(), make_choice(0)
    for number in range(MAX_SINGLE_OUTPUTS + 20 * MAX_JOINED_TOKENS):
        queue.put(choice, make_output(number))
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(MAX_SINGLE_OUTPUTS + 20):
        await queue.get()
    task.cancel()
    assert queue.num_outputs == 0
    assert num_turns >= 20
