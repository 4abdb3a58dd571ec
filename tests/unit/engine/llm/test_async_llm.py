"""`AsyncLLM` on a tiny checkpoint: its streams against `LLM`, cancellation, failures."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from baton_engine import LLM, AsyncLLM, RequestOutput, SamplingParams
from support.waiting import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_blocks": 96,
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 512,
}
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


@pytest.fixture
async def llm(checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(checkpoint, **OPTIONS) as llm:
        yield llm


async def outputs_of(
    llm: AsyncLLM, prompt: list[int], params: SamplingParams
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


async def running(llm: AsyncLLM) -> float:
    """Return the number of requests that the engine has."""
    metrics = await llm.get_metrics()
    names = ("baton:num_requests_running", "baton:num_requests_waiting")
    return sum(metric.value for metric in metrics if metric.name in names)


async def test_prompts_side_by_side_have_the_outputs_of_llm(
    llm: AsyncLLM, checkpoint: Path
) -> None:
    streams = await asyncio.gather(*(outputs_of(llm, prompt, GREEDY) for prompt in PROMPTS))
    with LLM(checkpoint, **OPTIONS) as offline:
        expected = offline.generate(PROMPTS, GREEDY, use_tqdm=False)
    for stream, whole in zip(streams, expected, strict=True):
        last = stream[-1]
        assert (last.finished, last.outputs[0].text) == (True, whole.outputs[0].text)
        assert last.outputs[0].token_ids == whole.outputs[0].token_ids
        assert last.outputs[0].finish_reason == "length"
        assert not any(output.finished for output in stream[:-1])


async def test_each_output_continues_the_earlier_one(llm: AsyncLLM) -> None:
    stream = await outputs_of(llm, PROMPTS[0], GREEDY)
    assert len(stream) > 3
    tokens = [output.outputs[0].token_ids for output in stream]
    for before, after in itertools.pairwise(tokens):
        assert after[: len(before)] == before
    assert len(tokens[-1]) == GREEDY.max_tokens


async def test_samples_and_stop_strings_are_those_of_llm(llm: AsyncLLM, checkpoint: Path) -> None:
    params = SamplingParams(n=2, best_of=4, seed=5, max_tokens=20, ignore_eos=True)
    with LLM(checkpoint, **OPTIONS) as offline:
        text = offline.generate("hello", LONG, use_tqdm=False)[0].outputs[0].text
        stopped = SamplingParams(
            temperature=0.0, max_tokens=400, ignore_eos=True, stop=text[20:24], logprobs=1
        )
        expected = offline.generate("hello", [params], use_tqdm=False)[0]
        expected_stop = offline.generate("hello", [stopped], use_tqdm=False)[0]
    [sampled] = [output async for output in llm.generate("hello", params)]
    assert [each.token_ids for each in sampled.outputs] == [
        each.token_ids for each in expected.outputs
    ]
    *_, last = [output async for output in llm.generate("hello", stopped)]
    assert last.outputs == expected_stop.outputs
    await until(lambda: has_ended(llm), "the end of the request at its stop string")


async def has_ended(llm: AsyncLLM) -> bool:
    return await running(llm) == 0


async def test_a_chat_is_rendered_with_its_tools(llm: AsyncLLM) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    template = "{{ messages[0].content }}{{ tools[0].function.name }}"
    async with aclosing(
        llm.chat([{"role": "user", "content": "hi "}], GREEDY, tools=tools, chat_template=template)
    ) as outputs:
        assert (await anext(outputs)).prompt == "hi add"
    with pytest.raises(ValueError, match="must not set tools"):
        await anext(llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"tools": 1}))


async def test_leaving_or_cancelling_a_stream_aborts_its_request(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate(PROMPTS[0], LONG)) as outputs:
        await anext(outputs)
        assert await running(llm) == 1
    await until(lambda: has_ended(llm), "the abort of a stream that was left")

    started = asyncio.Event()

    async def consume() -> None:
        async for _ in llm.generate(PROMPTS[1], LONG):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: has_ended(llm), "the abort of a cancelled stream")
    assert (await outputs_of(llm, PROMPTS[2], GREEDY))[-1].finished


async def test_invalid_prompts_are_refused_and_others_continue(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate(PROMPTS[0], LONG)) as outputs:
        await anext(outputs)
        for prompt, params, error, text in (
            ([], GREEDY, ValueError, "is empty"),
            ([5] * 600, GREEDY, ValueError, "the prompt"),
            ([1], SamplingParams(temperature=-1.0), ValueError, "temperature"),
            ([1], "greedy", TypeError, "sampling_params must be SamplingParams"),
            (5, GREEDY, TypeError, "must be a text"),
        ):
            with pytest.raises(error, match=text):
                await outputs_of(llm, prompt, params)  # type: ignore[arg-type]
        assert not (await anext(outputs)).finished


async def test_requests_wait_while_the_model_sleeps(llm: AsyncLLM) -> None:
    await llm.sleep(level=1)
    task = asyncio.create_task(outputs_of(llm, PROMPTS[0], GREEDY))
    await until(lambda: has_waiting(llm), "the waiting request")
    assert not task.done()
    await llm.wake_up()
    assert (await task)[-1].finished


async def has_waiting(llm: AsyncLLM) -> bool:
    return await running(llm) == 1


async def test_a_failed_engine_ends_all_streams_and_refuses_later_ones(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aclosing(llm.generate(PROMPTS[0], LONG)) as outputs:
        await anext(outputs)

        def fail() -> None:
            raise OSError("the worker is gone")

        monkeypatch.setattr(llm._model.core, "step_fn", fail)
        with pytest.raises(RuntimeError, match="OSError: the worker is gone"):
            async for _ in outputs:
                pass
    with pytest.raises(RuntimeError, match="the worker is gone"):
        await outputs_of(llm, PROMPTS[0], GREEDY)
    with pytest.raises(RuntimeError, match="the worker is gone"):
        await llm.get_metrics()


async def test_close_ends_streams_and_the_thread(checkpoint: Path) -> None:
    llm = AsyncLLM(checkpoint, **OPTIONS)
    async with aclosing(llm.generate(PROMPTS[0], LONG)) as outputs:
        await anext(outputs)
        await asyncio.to_thread(llm.close)
        with pytest.raises(RuntimeError, match="is closed"):
            async for _ in outputs:
                pass
    with pytest.raises(RuntimeError, match="is closed"):
        await outputs_of(llm, PROMPTS[0], GREEDY)
    llm.close()


async def test_a_forgotten_llm_ends_its_thread(checkpoint: Path) -> None:
    llm = AsyncLLM(checkpoint, **OPTIONS)
    [thread] = [each for each in threading.enumerate() if each.name == "engine loop"]
    del llm
    gc.collect()
    await until(lambda: not thread.is_alive(), "the end of the thread")
