"""A running request keeps no messages, tools, schemas, long options or prompt logprobs."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import pytest

from baton_gateway.requests.job import PromptJob, SampleRun
from baton_protocol.engine_messages import EngineCoreOutput, PromptLogprobs
from baton_text.output import TextOutput
from baton_text.request_error import RequestError
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.messages_request import MessagesRequest
from baton_text.requests.parsing import Checked, parse_request
from baton_text.requests.responses_request import ResponsesRequest
from support.gateway.gateway_rig import GatewayRig
from support.waiting import until

NAMES = [f"name {number}" for number in range(1000)]
SCHEMA = {"type": "object", "properties": {"name": {"enum": NAMES}}}
FUNCTION = {"name": "find", "parameters": SCHEMA}
MESSAGES = [{"role": "user", "content": name} for name in NAMES]
BODIES: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
    (
        ChatCompletionRequest,
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": FUNCTION}],
            "chat_template_kwargs": {"names": NAMES},
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
    ),
    (CompletionRequest, {"prompt": NAMES, "guided_json": SCHEMA}),
    (
        CompletionRequest,
        {
            "prompt": "hi",
            "logit_bias": {str(number): 1.0 for number in range(1000)},
            "allowed_token_ids": list(range(1000)),
            "bad_words": NAMES,
        },
    ),
    (CompletionRequest, {"prompt": [[1] * 1000], "structured_outputs": {"json": SCHEMA}}),
    (
        ResponsesRequest,
        {
            "input": MESSAGES,
            "tools": [{"type": "function", **FUNCTION}],
            "metadata": {"names": "x" * 1000},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ),
    (
        MessagesRequest,
        {
            "messages": MESSAGES,
            "max_tokens": 5,
            "system": "x" * 1000,
            "tools": [{"name": "find", "input_schema": SCHEMA}],
            "output_format": {"type": "json_schema", "schema": SCHEMA},
        },
    ),
]


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=[f"{kind.__name__}" for kind, _ in BODIES])
def test_the_values_of_the_prompt_are_dropped(
    kind: type[msgspec.Struct], body: dict[str, Any]
) -> None:
    request = msgspec.convert(body, kind)
    assert len(msgspec.json.encode(request)) > 3000
    request.release_prompt()  # type: ignore[attr-defined]
    assert len(msgspec.json.encode(request)) < 2500


NESTED: dict[str, list[Any]] = {
    "thinking": [{"type": "x" * 10_000}],
    "reasoning": [{"effort": "x" * 10_000}],
}


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (ChatCompletionRequest, {"messages": MESSAGES[:1]}),
        (CompletionRequest, {"prompt": "hi"}),
        (ResponsesRequest, {"input": "hi"}),
        (MessagesRequest, {"messages": MESSAGES[:1], "max_tokens": 5}),
    ],
)
def test_no_field_keeps_a_long_value(kind: type[Checked], needed: dict[str, Any]) -> None:
    """A running request is not charged for its body."""
    num_accepted = 0
    for name in kind.__struct_fields__:  # type: ignore[attr-defined]
        if name in ("model", "previous_response_id"):  # refused unless they are known
            continue
        long: list[Any] = ["x" * 10_000, ["x" * 200] * 50, list(range(5000)), {"a": "x" * 10_000}]
        for value in [*long, *NESTED.get(name, [])]:
            body = msgspec.json.encode(needed | {name: value})
            try:
                request = parse_request(body, kind)
                chat = getattr(request, "chat_request", lambda request=request: request)()
            except RequestError:
                continue
            num_accepted += 1
            request.release_prompt()  # type: ignore[attr-defined]
            chat.release_prompt()
            for each in (request, chat):
                assert len(msgspec.json.encode(each)) < 5000, f"{name} is kept"
    assert num_accepted > 1


def test_the_refusal_of_a_schema_still_names_its_field() -> None:
    for body, field in (({"guided_json": SCHEMA}, "guided_json"), (BODIES[3][1], None)):
        request = msgspec.convert({"prompt": "hi"} | body, CompletionRequest)
        expected = field or "structured_outputs"
        request.release_prompt()
        assert request.refusal("structured_output: no state").param == expected


async def test_a_running_request_keeps_no_tools(rig: GatewayRig) -> None:
    engine = rig.engine("d", "decode", "hello world")
    engine.hold_after = 1
    await rig.start(engine)
    marks = [f"mark {number}" for number in range(1000)]
    tool = {"name": "find", "parameters": {"enum": marks}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "none",
    }
    async with rig.slow_connection("/v1/chat/completions", body):
        await until(lambda: engine.adds, "the request at the engine")

        def kept() -> int:
            lists = (each for each in gc.get_objects() if type(each) is list)
            return sum(each == marks and each is not marks for each in lists)

        await until(lambda: not kept(), "the tools dropped")
    engine.released.set()


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "hello world", "echo": True, "logprobs": 2, "stream": True},
        {"prompt": ["hello world", "hello"], "prompt_logprobs": 2},
    ],
    ids=["stream", "complete"],
)
async def test_a_running_request_keeps_no_prompt_logprobs_as_objects(
    rig: GatewayRig, options: dict[str, Any]
) -> None:
    engine = rig.engine("d", "decode", "hello world, the quick brown fox")
    engine.hold_after = 1
    await rig.start(engine)
    seen: list[PromptJob] = []
    share = PromptJob.share_logprobs

    async def recorded(
        prompt: PromptJob, run: SampleRun, output: EngineCoreOutput
    ) -> PromptLogprobs:
        seen.append(prompt)
        return await share(prompt, run, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptJob, "share_logprobs", recorded)
        async with rig.slow_connection(
            "/v1/completions", {"model": "m", "max_tokens": 5} | options
        ):
            await until(lambda: seen, "the prompt logprobs at the gateway")

            def kept() -> int:
                outputs = (each for each in gc.get_objects() if type(each) is TextOutput)
                return sum(bool(each.prompt_logprobs) for each in outputs)

            await until(lambda: not kept(), "the prompt logprobs dropped")
            assert rig.metric("baton:requests_in_flight") == 1
            engine.released.set()
