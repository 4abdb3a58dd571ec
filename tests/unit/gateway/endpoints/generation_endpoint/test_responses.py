"""OpenAI's /v1/responses, through the `openai` client."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest

from baton_gateway.endpoints import generation_endpoint
from baton_gateway.http import body_budget
from baton_gateway.http.request_body import INLINE_BODY_BYTES
from baton_gateway.requests.response_store import ResponseStore
from baton_protocol.options.config import AccessConfig
from baton_protocol.sampling_params import StructuredOutputKind
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": None, "strict": None}
ANSWER = (
    '<think>Two calls.</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Malmö"}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    "</tool_call>"
)
EXPECTED = [
    ("reasoning", "Two calls."),
    ("message", "I look."),
    ("function_call", "get_weather", '{"city": "Malmö"}'),
    ("function_call", "add", '{"a": 1}'),
]


@pytest.fixture
def rig(make_rig: MakeRig) -> GatewayRig:
    return make_rig(tool_parser="hermes", reasoning_parser="think")


def items_of(response: Any) -> list[tuple[str, ...]]:
    """Return kind and text of each item. Each item must be complete and have an id of its own."""
    assert len({item.id for item in response.output}) == len(response.output)
    assert {item.status for item in response.output} <= {"completed"}
    return [
        (item.type, item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, "".join(part.text for part in item.content))
        for item in response.output
    ]


async def create(rig: GatewayRig, **options: Any) -> Any:
    return await rig.client().responses.create(**{"model": "m", "input": "hi", **options})


async def test_a_response_has_reasoning_text_and_calls(rig: GatewayRig) -> None:
    await rig.start(rig.answering(ANSWER))
    response = await create(rig, tools=[WEATHER, ADD], metadata={"a": "b"}, temperature=0.5)
    assert items_of(response) == EXPECTED
    assert response.output_text == "I look."
    assert (response.status, response.object, response.model) == ("completed", "response", "m")
    assert (response.metadata, response.temperature) == ({"a": "b"}, 0.5)
    assert [tool.name for tool in response.tools] == ["get_weather", "add"]
    usage = response.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_a_stream_makes_the_same_response(rig: GatewayRig) -> None:
    await rig.start(rig.answering(ANSWER))
    fields: Any = {"model": "m", "input": "hi", "tools": [WEATHER, ADD]}
    async with rig.client().responses.stream(**fields) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert items_of(response) == EXPECTED
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    assert list(deltas.values()) == [item[-1] for item in EXPECTED]
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        assert f"response.{kind}.done" in kinds


async def test_a_limit_on_tokens_makes_the_response_incomplete(rig: GatewayRig) -> None:
    await rig.start(rig.answering("one two three four"))
    response = await create(rig, max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    events = [event async for event in await create(rig, max_output_tokens=1, stream=True)]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].status == "incomplete"


@pytest.mark.usefixtures("agent_template")
async def test_an_agent_runs_five_turns(rig: GatewayRig) -> None:
    """Each turn continues the stored conversation, or sends all of it. The prompts are equal."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    engine = rig.answering(call)
    await rig.start(engine)
    items: list[Any] = [{"role": "user", "content": "hi"}]
    stored = await create(rig, input=items, tools=[ADD])
    for turn in range(5):
        [item] = stored.output
        result = {"type": "function_call_output", "call_id": item.call_id, "output": str(turn)}
        items += [item.model_dump(exclude_none=True), result]
        stored = await create(rig, input=[result], tools=[ADD], previous_response_id=stored.id)
        await create(rig, input=items, tools=[ADD], store=False)
        continued, whole = engine.adds[-2:]
        assert continued.prompt_token_ids == whole.prompt_token_ids
    assert stored.previous_response_id is not None


@pytest.mark.usefixtures("agent_template")
async def test_a_reference_is_replaced_by_the_kept_item(rig: GatewayRig) -> None:
    engine = rig.answering(ANSWER)
    await rig.start(engine)
    first = await create(rig, tools=[WEATHER, ADD])
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "1"}
        for item in first.output[2:]
    ]
    items = [item.model_dump(exclude_none=True) for item in first.output]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    user = {"role": "user", "content": "hi"}
    for given in (items, references):
        await create(rig, input=[user, *given, *results], tools=[WEATHER, ADD])
    whole, referring = engine.adds[1:]
    assert referring.prompt_token_ids == whole.prompt_token_ids
    missing = {"type": "item_reference", "id": f"{first.output[0].id}9"}
    with pytest.raises(openai.BadRequestError, match="no kept response has this item"):
        await create(rig, input=[missing])


async def test_instructions_are_not_kept(rig: GatewayRig) -> None:
    engine = rig.answering("ok")
    await rig.start(engine)
    first = await create(rig, instructions="Be brief.")
    for instructions in ("Be rude.", None):
        await create(rig, instructions=instructions, input="go", previous_response_id=first.id)
    prompts = [rig.tokenizer.decode(request.prompt_token_ids) for request in engine.adds]
    assert ["brief" in prompt for prompt in prompts] == [True, False, False]
    assert ["rude" in prompt for prompt in prompts] == [False, True, False]
    assert all("hi" in prompt and "ok" in prompt for prompt in prompts[1:])


async def test_responses_are_read_and_deleted(rig: GatewayRig) -> None:
    await rig.start(rig.answering("ok"))
    response = await create(rig)
    client = rig.client()
    assert (await client.responses.retrieve(response.id)).output_text == "ok"
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="is not stored here"):
        await client.responses.retrieve(response.id)
    forgotten = await create(rig, store=False)
    for missing in (response.id, forgotten.id):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(rig, previous_response_id=missing)
        assert refused.value.code == "previous_response_not_found"


async def test_clients_do_not_see_the_responses_of_others(make_rig: MakeRig, tmp_path: Any) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"the-key-of-client-{name}")
    rig = make_rig(access=AccessConfig(api_keys_dir=str(tmp_path)))
    await rig.start(rig.answering("ok"))
    a, b = (rig.client().with_options(api_key=f"the-key-of-client-{name}") for name in "ab")
    response = await a.responses.create(model="m", input="hi")
    with pytest.raises(openai.NotFoundError):
        await b.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        await b.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError):
        await b.responses.create(model="m", input="x", previous_response_id=response.id)
    reference: Any = {"type": "item_reference", "id": response.output[0].id}
    await a.responses.create(model="m", input=[reference])
    with pytest.raises(openai.BadRequestError, match="is not stored here"):
        await b.responses.create(model="m", input=[reference])
    assert (await a.responses.retrieve(response.id)).id == response.id


async def test_a_failure_within_a_stream_is_an_event(rig: GatewayRig) -> None:
    engine = rig.answering("one two three", hold_after=2)
    await rig.start(engine)
    events = []
    async for event in await create(rig, stream=True):
        events.append(event)
        if event.type == "response.output_text.delta":
            engine.die()
    assert (events[-1].type, events[-1].code) == ("error", "service_unavailable")
    assert "The gateway's log has the reason" in events[-1].message


async def test_a_text_follows_a_schema(rig: GatewayRig) -> None:
    engine = rig.answering("{}")
    await rig.start(engine)
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    await create(rig, text={"format": form})
    [request] = engine.adds
    structure = request.sampling_params.structured_output
    assert structure.kind is StructuredOutputKind.GRAMMAR, "it begins after the reasoning"
    assert '%json {"type": "object"' in structure.spec


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": ""}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x"}] * 2}, "input[1].id"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"truncation": "auto"}, "truncation"),
        ({"metadata": {"a": "x" * 2**18}}, "tools"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
async def test_invalid_bodies_are_refused(
    rig: GatewayRig, options: dict[str, Any], param: str
) -> None:
    await rig.start(rig.answering("ok"))
    with pytest.raises(openai.BadRequestError) as refused:
        await create(rig, **options)
    assert refused.value.param == param


async def test_kept_responses_count_against_the_limits(make_rig: MakeRig) -> None:
    rig = make_rig(max_concurrent_requests=1)
    engine = rig.answering("one two three")
    await rig.start(engine)
    response = await create(rig)
    engine.hold_after = 2
    async with await create(rig, stream=True) as stream:
        await anext(event async for event in stream if event.type.endswith(".delta"))
        with pytest.raises(openai.RateLimitError):
            await rig.client().responses.retrieve(response.id)
    await until(lambda: rig.gateway.admission.is_idle, "the end of the stream")
    assert (await rig.client().responses.retrieve(response.id)).id == response.id


async def test_a_kept_response_counts_as_a_body_until_it_is_sent(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(rig.answering("ok"))
    response = await create(rig, metadata={"a": "x" * 100_000})
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 100_000)
    client = rig.client().with_options(max_retries=0)
    with pytest.raises(openai.InternalServerError) as refused:
        await client.responses.retrieve(response.id)
    assert refused.value.status_code == 503
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 110_000)
    assert (await client.responses.retrieve(response.id)).id == response.id
    assert rig.metric("baton:gateway_body_bytes") == 0


async def test_a_kept_conversation_counts_before_a_thread_counts_its_values(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.answering("ok")
    engine.max_model_len = 200_000
    await rig.start(engine)
    first = await create(rig, input="x" * 2 * INLINE_BODY_BYTES)
    released = threading.Event()

    def count(conversation: bytes) -> int:
        assert released.wait(DEADLINE_S), "`released` was not set"
        return 0

    monkeypatch.setattr(generation_endpoint, "bound_values", count)
    second = asyncio.create_task(create(rig, input="go", previous_response_id=first.id))
    try:
        await until(
            lambda: rig.metric("baton:gateway_body_bytes") > 2 * INLINE_BODY_BYTES,
            "the bytes of the conversation in the budget",
        )
    finally:
        released.set()
    await second


async def test_a_kept_conversation_counts_as_a_part_of_the_body(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(rig.answering("ok"))
    first = await create(rig, input=[{"role": "user", "content": "hi"}] * 15)
    second = await create(rig, input="go", previous_response_id=first.id)
    monkeypatch.setattr(body_budget, "MAX_TOTAL_BODY_BYTES", 1000)
    await create(rig, input="go")
    with pytest.raises(openai.InternalServerError) as refused:
        await create(rig, input="go", previous_response_id=second.id)
    assert refused.value.code == "too_many_bytes"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await create(rig, model="other", previous_response_id=second.id)


@pytest.mark.usefixtures("agent_template")
async def test_references_of_large_bodies_are_resolved_in_a_thread(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(rig.answering("ok"))
    threads: list[bool] = []
    earlier = ResponseStore.earlier

    def recorded(self: ResponseStore, *args: Any) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return earlier(self, *args)

    monkeypatch.setattr(ResponseStore, "earlier", recorded)
    first = await create(rig)
    reference = {"type": "item_reference", "id": first.output[0].id}
    long = {"role": "user", "content": "hi", "ignored": "x" * INLINE_BODY_BYTES}
    await create(rig, input=[reference, long])
    assert threads == [True, False]
