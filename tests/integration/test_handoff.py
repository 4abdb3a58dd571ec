"""Engines and a gateway as processes: the tokens are the reference's, and the KV cache is moved."""

from __future__ import annotations

import asyncio
import json
import random
import signal

import openai
import pytest

from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    GATEWAY_METRICS_PORT,
    GATEWAY_PORT,
    CacheConfig,
    KVRole,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams, StructuredOutput, StructuredOutputKind
from baton_text.reply_parsing.reasoning import REASONING_FORMATS
from baton_text.reply_parsing.reply_grammar import ReplyGrammar
from baton_text.tokenizer import Tokenizer
from support.completions import (
    VOCAB,
    check_continuations,
    complete,
    complete_samples,
    engine_client,
    generate,
)
from support.parity import assert_greedy, prompts
from support.pods import pods
from support.waiting import until


async def test_an_engine_alone_generates_the_greedy_tokens_of_transformers(stack) -> None:
    asked = prompts(32, VOCAB, longest=150, seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    async with engine_client(stack.prefill) as client:
        outputs = await asyncio.gather(
            *(
                generate(client, EngineCoreRequest(f"alone-{i}", prompt, params))
                for i, prompt in enumerate(asked)
            )
        )
    assert_greedy(stack.reference, asked, list(outputs), f"{stack.arch} engine alone")


async def test_a_hand_off_gives_greedy_tokens_without_computing_the_prompt_again(stack) -> None:
    asked = prompts(32, VOCAB, longest=150, seed=2)
    before = stack.decode.metric("baton:prompt_tokens_computed_total")
    sent_before = stack.prefill.metric("baton:prompt_tokens_computed_total")
    outputs = await asyncio.gather(*(complete(stack.url, prompt) for prompt in asked))
    assert_greedy(stack.reference, asked, list(outputs), f"{stack.arch} whole path")
    assert stack.decode.metric("baton:prompt_tokens_computed_total") == before
    assert stack.decode.metric("baton:kv_transfer_bytes_received_total") > 0
    assert stack.prefill.metric("baton:prompt_tokens_computed_total") > sent_before
    moved = stack.decode.metric("baton:prompt_tokens_remote_total") + stack.decode.metric(
        "baton:prompt_tokens_cached_total"
    )
    assert moved >= sum(map(len, asked))


async def test_a_seed_gives_the_same_tokens_beside_other_requests(stack) -> None:
    prompt = list(range(20, 60))
    alone = await complete(stack.url, prompt, temperature=1.0, seed=1234)
    crowd = [
        complete(stack.url, other, temperature=1.0)
        for other in prompts(6, VOCAB, longest=90, seed=3)
    ]
    again, other, *_ = await asyncio.gather(
        complete(stack.url, prompt, temperature=1.0, seed=1234),
        complete(stack.url, prompt, temperature=1.0, seed=1235),
        *crowd,
    )
    assert again == alone
    assert other != alone


@pytest.mark.parametrize("max_tokens", [1, 24])
async def test_samples_of_a_prompt_cost_one_prefill_and_one_transfer(stack, max_tokens) -> None:
    """Their tokens are those of an engine that computes the prompt itself."""

    def counts() -> list[float]:
        return [
            *stack.prefill.metrics(
                "baton:prompt_tokens_computed_total", "baton:kv_transfer_blocks_sent_total"
            ),
            *stack.decode.metrics(
                "baton:kv_transfer_blocks_received_total",
                "baton:kv_transfer_bytes_received_total",
                "baton:prompt_tokens_remote_total",
                "baton:prompt_tokens_computed_total",
            ),
        ]

    async def cost(
        prompt: list[int], n: int, num_tokens: int
    ) -> tuple[list[list[int]], list[float]]:
        before = counts()
        tokens = await complete_samples(stack.url, prompt, n, num_tokens, temperature=1.0, seed=7)
        return tokens, [new - old for new, old in zip(counts(), before, strict=True)]

    base = max_tokens * 3
    first, second = ([token + base for token in range(start, start + 101)] for start in (10, 200))
    _, of_one = await cost(first, 1, 24)
    tokens, of_four = await cost(second, 4, max_tokens)
    assert of_one[0] == of_four[0] == 101
    assert of_one[1:5] == of_four[1:5]
    assert of_four[4] == 101
    assert of_four[5] == 4, "each sample runs the last prompt token only"
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=max_tokens, ignore_eos=True)
    async with engine_client(stack.prefill) as client:
        alone = await asyncio.gather(
            *(
                generate(
                    client,
                    EngineCoreRequest(
                        f"alone-{max_tokens}-{index}",
                        second,
                        params,
                        sample_index=index,
                        cache_salt="computed again",
                        group_id="g",
                    ),
                )
                for index in range(4)
            )
        )
    assert tokens == alone
    assert len(set(map(tuple, tokens))) > 1


async def test_required_tool_calls_follow_their_schema(stack) -> None:
    """The model's weights are random, so only the grammar makes the calls valid."""
    city = {"enum": ["Malmö", "Lund"]}
    schema = {
        "type": "object",
        "properties": {"city": city, "days": {"type": "array", "items": city, "maxItems": 2}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    client = openai.AsyncOpenAI(base_url=stack.url, api_key="unused", max_retries=0, timeout=120)
    async with client:
        answer = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            n=4,
            max_tokens=150,
            seed=3,
        )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather"
        assert {arguments["city"], *arguments["days"]} <= {"Malmö", "Lund"}


async def test_an_engine_continues_the_request_of_another_engine(stack) -> None:
    """A pod needs only the prompt, the generated ids and the seed to continue."""
    params = SamplingParams(
        temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=99, max_tokens=40, ignore_eos=True
    )
    prompt = list(range(100, 141))
    async with engine_client(stack.prefill) as one, engine_client(stack.decode) as two:
        whole = await generate(one, EngineCoreRequest("whole", prompt, params))
        await check_continuations(two, prompt, params, whole, (1, 7, 39))


BUDGET = 6
#: The grammar of a reply whose reasoning the prompt has begun.
THINKING = ReplyGrammar(
    REASONING_FORMATS["think"],
    is_reasoning=True,
    thinking_budget=BUDGET,
    special_token_id=lambda _: None,
).text(None)


async def test_a_thinking_budget_holds_on_the_engine_that_continues(stack) -> None:
    """The prefill engine samples the first token of a hand-off, or an engine resumes a reply."""
    structure = StructuredOutput(StructuredOutputKind.GRAMMAR, THINKING)
    params = SamplingParams(seed=5, max_tokens=40, ignore_eos=True, structured_output=structure)
    prompt = list(range(100, 141))
    async with engine_client(stack.prefill) as one, engine_client(stack.decode) as two:
        whole = await generate(one, EngineCoreRequest("whole", prompt, params))
        tokenizer = Tokenizer.from_folder(stack.checkpoint)
        text = tokenizer.decode(whole)
        thought = text.partition("</think>")[0]
        assert thought != text
        assert thought == tokenizer.decode(whole[:BUDGET])
        await check_continuations(two, prompt, params, whole, (1, BUDGET, BUDGET + 1))
    before = stack.prefill.metric("baton:generation_tokens_total")
    sampling = {"temperature": 1.0, "seed": 5, "grammar": THINKING}
    assert await complete(stack.url, prompt, 40, **sampling) == whole
    assert stack.prefill.metric("baton:generation_tokens_total") == before + 1


async def test_requests_survive_a_killed_prefill_engine_and_use_it_after_its_restart(
    own_stack,
) -> None:
    prompt = list(range(30, 130))
    sampling = {"temperature": 1.0, "seed": 11}
    expected = await complete(own_stack.url, prompt)
    expected_samples = await complete_samples(own_stack.url, prompt[::-1], 3, **sampling)
    own_stack.prefill.kill()
    assert await complete(own_stack.url, prompt) == expected
    again = await complete_samples(own_stack.url, prompt[::-1], 3, **sampling)
    assert again == expected_samples
    own_stack.prefill.restart()
    own_stack.prefill.wait_ready(ENGINE_HTTP_PORT)

    async def is_handed_over() -> bool:
        before = own_stack.decode.metric("baton:prompt_tokens_remote_total")
        fresh = prompts(1, VOCAB, longest=100, seed=int(before) + 77)[0] * 40
        await complete(own_stack.url, fresh[:90], 4)
        return own_stack.decode.metric("baton:prompt_tokens_remote_total") > before

    await until(is_handed_over, "a hand-off to the restarted engine", 120, every_s=0.2)


async def test_running_requests_survive_the_death_of_the_decode_engine(own_stack) -> None:
    """The gateway resends the tokens so far, and the restarted pod continues after them."""
    asked = prompts(4, VOCAB, longest=60)
    sampling = {"temperature": 1.0, "seed": 12}
    expected = await complete_samples(own_stack.url, asked[0], 3, 400, **sampling)
    running = [asyncio.create_task(complete(own_stack.url, prompt, 400)) for prompt in asked]
    group = asyncio.create_task(complete_samples(own_stack.url, asked[0], 3, 400, **sampling))
    before = own_stack.decode.metric("baton:generation_tokens_total")
    await until(
        lambda: own_stack.decode.metric("baton:generation_tokens_total") >= before + 40, "40 tokens"
    )
    own_stack.decode.kill()
    own_stack.decode.restart()
    async with asyncio.timeout(120):
        resumed = await asyncio.gather(*running)
        assert await group == expected
    assert [len(output) for output in resumed] == [400] * len(asked)
    assert own_stack.gateway.metric("baton:requests_resumed_total", GATEWAY_METRICS_PORT) >= 1
    assert_greedy(own_stack.reference, asked, list(resumed), "resumed")


async def test_sigterm_drains_running_streams_and_exits_zero(own_stack) -> None:
    async with openai.AsyncOpenAI(
        base_url=own_stack.url, api_key="unused", max_retries=0
    ) as client:
        stream = await client.completions.create(
            model="m",
            prompt="relay",
            max_tokens=150,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        first = await anext(aiter(stream))
        own_stack.gateway.process.send_signal(signal.SIGTERM)
        own_stack.decode.process.send_signal(signal.SIGTERM)
        rest = [chunk async for chunk in stream]
    assert first.choices
    assert rest[-1].choices[0].finish_reason == "length"
    assert own_stack.gateway.process.wait(timeout=60) == 0
    assert own_stack.decode.process.wait(timeout=60) == 0


async def test_an_overloaded_prefill_engine_leaves_no_prompt_to_the_decode_engine(
    stack, tmp_path
) -> None:
    """Twelve clients share an engine that runs four requests. Their loads also wait for memory."""
    if stack.arch != "qwen3":
        pytest.skip("one architecture is enough here")
    rng = random.Random(5)
    asked = [[rng.randrange(3, VOCAB) for _ in range(400)] for _ in range(36)]
    outputs: dict[int, list[int]] = {}
    with pods(tmp_path, 21) as group:
        slow = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4)
        few = CacheConfig(num_blocks=160)
        prefill = group.engine("prefill", stack.checkpoint, KVRole.PRODUCER, scheduler=slow)
        decode = group.engine("decode", stack.checkpoint, KVRole.CONSUMER, cache=few)
        gateway = group.gateway("gateway", stack.checkpoint, {prefill: "prefill", decode: "decode"})
        for pod in (prefill, decode):
            pod.wait_ready(ENGINE_HTTP_PORT)
        gateway.wait_ready(GATEWAY_PORT)
        url = f"http://{gateway.address}:{GATEWAY_PORT}/v1"

        async def send(first: int) -> None:
            for index in range(first, len(asked), 12):
                outputs[index] = await complete(url, asked[index], 8)

        clients = asyncio.gather(*(send(first) for first in range(12)))
        await until(lambda: prefill.metric("baton:num_requests_waiting") >= 4, "a queue of prompts")
        await clients
        assert prefill.metric("baton:prompt_tokens_computed_total") == 36 * 400
        assert decode.metric("baton:prompt_tokens_computed_total") == 0
        assert decode.metric("baton:kv_transfer_recomputed_tokens_total") == 0
        _, metrics = gateway.get(GATEWAY_METRICS_PORT, "/metrics")
        assert 'baton:prefill_stages_total{outcome="done"} 36.0' in metrics
        assert "baton:prefill_fallbacks_total{" not in metrics
    generated = [outputs[index] for index in range(len(asked))]
    assert_greedy(stack.reference, asked, generated, "overloaded prefill engine")


async def test_preemption_in_a_tiny_block_pool_keeps_the_tokens(
    checkpoints, stack, tmp_path
) -> None:
    if stack.arch != "qwen3":
        pytest.skip("one architecture is enough here")
    with pods(tmp_path, 20) as group:
        engine = group.engine("tiny", stack.checkpoint, cache=CacheConfig(num_blocks=24))
        engine.wait_ready(ENGINE_HTTP_PORT)
        asked = prompts(12, VOCAB, longest=100, seed=4)
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        async with engine_client(engine) as client:
            outputs = await asyncio.gather(
                *(
                    generate(client, EngineCoreRequest(f"r{i}", prompt, params))
                    for i, prompt in enumerate(asked)
                )
            )
        assert_greedy(stack.reference, asked, list(outputs), "tiny pool")
        assert engine.metric("baton:num_preemptions_total") > 0
