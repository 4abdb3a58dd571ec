"""/openapi.json describes the gateway's requests and responses."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from jsonschema.validators import Draft202012Validator

from baton_gateway.access import auth_delays
from baton_gateway.access.api_keys import OPEN_PATHS
from baton_gateway.endpoints.openapi import document
from baton_gateway.endpoints.openapi.document import make_document
from baton_gateway.endpoints.openapi.operations import FAILURES, OPERATIONS
from baton_protocol.engine_messages import ErrorCode
from baton_protocol.options.config import AccessConfig
from baton_protocol.pooling_params import Task
from baton_text.request_error import RequestError
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.generation_request import MAX_N
from baton_text.requests.messages_request import MessagesRequest
from baton_text.requests.parsing import parse_request
from baton_text.requests.responses_request import ResponsesRequest
from support.gateway.fake_engine import EOS_ID
from support.gateway.gateway_rig import GatewayRig, MakeRig, http_session

CALLS = (
    '<think>A call.</think>\n\nI look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    "</tool_call>"
)
FUNCTION = {"name": "add", "description": "Adds", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
#: Requests that succeed: a path, and a body.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": FUNCTION}]}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
    ("/v1/chat/completions", CHAT | {"n": 2, "stop": ["o"], "return_token_ids": True}),
    ("/v1/completions", {"prompt": "go", "max_tokens": 3, "unknown": 5}),
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "echo": True, "suffix": ""}),
    ("/v1/completions", {"prompt": [1, 2], "prompt_logprobs": 2, "max_tokens": 2}),
    ("/v1/responses", {"input": "hi", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "text": {"verbosity": "low"}}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "store": False}),
    ("/v1/messages", CHAT | {"max_tokens": 50, "thinking": {"type": "enabled"}}),
    ("/v1/messages", CHAT | {"max_tokens": 50, "tools": [{"name": "add", "input_schema": {}}]}),
    ("/v1/messages", CHAT | {"max_tokens": 2, "stop_sequences": ["x"]}),
    ("/v1/messages/count_tokens", CHAT),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/tokenize", {"messages": [USER]}),
    ("/detokenize", {"tokens": [5, 6]}),
]
#: Requests that fail: a method, a path, the status, and a body.
FAILING: list[tuple[str, str, int, Any]] = [
    ("GET", "/v1/models/other", 404, None),
    ("GET", "/v1/responses/resp_1", 404, None),
    ("DELETE", "/v1/responses/resp_1", 404, None),
    *(
        ("POST", path, status, body)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
        for status, body in ((400, {}), (415, "text"))
    ),
    ("POST", "/v1/messages", 404, CHAT | {"model": "other", "max_tokens": 2}),
    ("POST", "/v1/messages/count_tokens", 400, []),
    ("POST", "/v1/messages/count_tokens", 404, CHAT | {"model": "other"}),
    ("POST", "/tokenize", 400, {}),
    ("POST", "/detokenize", 400, {"tokens": [-1]}),
]

DOCUMENT = make_document(needs_key=False)
DOCUMENT_WITH_KEYS = make_document(needs_key=True)


class Documented:
    """Checks the requests and responses of a gateway against its document."""

    def __init__(self, rig: GatewayRig, document: dict[str, Any], key: str = "") -> None:
        self._rig = rig
        self.document = document
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def call(self, method: str, path: str, body: Any = None, template: str = "") -> Any:
        """Send a request, and check the response. Return its status, and its JSON or its text."""
        operation = self.document["paths"][template or path][method.lower()]
        options = (
            {"data": body} if isinstance(body, str) else {"json": body} if body is not None else {}
        )
        async with (
            http_session() as session,
            session.request(
                method, self._rig.url + path, headers=self._headers, **options
            ) as response,
        ):
            text = await response.text()
        answer = self.resolve(operation["responses"][str(response.status)])
        for name, header in answer["headers"].items():
            self.validate(response.headers[name], self.resolve(header)["schema"], as_text=True)
        if "content" not in answer:
            assert text == ""
            return response.status, text
        media = answer["content"][response.content_type]
        if response.content_type == "text/event-stream":
            event_schema = media["schema"].get("anyOf", [media["schema"]])[-1]
            events = re.findall(r"^data: (.*)$", text, re.MULTILINE)
            for event in events:
                self.validate({"data": event}, media["schema"])
                if event != "[DONE]":
                    content_schema = event_schema["properties"]["data"]["contentSchema"]
                    self.validate(msgspec.json.decode(event), content_schema)
            return response.status, events
        content: Any = text
        if response.content_type == "application/json":
            content = msgspec.json.decode(text)
        self.validate(content, media["schema"])
        if response.status == 200 and isinstance(body, dict):
            self.validate(body, operation["requestBody"]["content"]["application/json"]["schema"])
        return response.status, content

    def resolve(self, node: dict[str, Any]) -> dict[str, Any]:
        """Return the schema that a reference names."""
        if "$ref" not in node:
            return node
        found: Any = self.document
        for name in node["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return found  # type: ignore[no-any-return]

    def validate(self, value: Any, schema: dict[str, Any], *, as_text: bool = False) -> None:
        """Raise ValidationError if `schema` does not allow `value`."""
        if as_text and schema.get("type") == "integer":
            value = int(value)
        components = self.document["components"]
        Draft202012Validator({**schema, "components": components}).validate(value)


async def started(
    rig: GatewayRig, text: str = "hello world", key: str = "", task: Task = Task.GENERATE
) -> Documented:
    """Start the gateway with an engine that answers with `text`. Return its document."""
    engine = rig.engine("d", "decode", text)
    engine.pool(task)
    engine.answer.append(EOS_ID)
    await rig.start(engine)
    documented = Documented(rig, DOCUMENT_WITH_KEYS if key else DOCUMENT, key)
    assert await documented.call("GET", "/openapi.json") == (200, documented.document)
    return documented


@pytest.mark.parametrize("document", [DOCUMENT, DOCUMENT_WITH_KEYS], ids=["open", "keys"])
def test_schemas_and_references_are_valid(document: dict[str, Any]) -> None:
    references = set(re.findall(rb'"\$ref":"([^"]*)"', msgspec.json.encode(document)))
    documented = Documented(None, document)  # type: ignore[arg-type]
    assert all(documented.resolve({"$ref": each.decode()}) for each in references)
    for name, schema in document["components"]["schemas"].items():
        assert "." not in name, "two structs have the same name"
        Draft202012Validator.check_schema(schema)
    identifiers = [
        operation["operationId"]
        for methods in document["paths"].values()
        for method, operation in methods.items()
        if method != "parameters"
    ]
    assert len(identifiers) == len(set(identifiers))


async def test_it_has_exactly_the_routes_of_the_gateway(rig: GatewayRig) -> None:
    routes = {
        (route.method, route.resource.canonical)
        for route in rig.gateway.app.router.routes()
        if route.method != "HEAD"
    }
    documented = {
        (method.upper(), path)
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
        if method != "parameters"
    }
    assert documented == routes


def test_it_has_every_status_and_code_of_the_errors() -> None:
    document = DOCUMENT_WITH_KEYS
    statuses = {
        int(status)
        for methods in document["paths"].values()
        for method, operation in methods.items()
        if method != "parameters"
        for status in operation["responses"]
    }
    # 405 is for methods that no path has, so it is in the description.
    assert statuses == {200, *(each.status for each in FAILURES)} - {405}
    text = str(document["info"]) + str(document["components"]["responses"])
    codes = {code for each in FAILURES for code in each.codes}
    assert set(re.findall(r"`([a-z_]+)`", text)) - {"param", "previous_response_id"} == codes


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_and_responses_have_the_documented_schemas(
    make_rig: MakeRig, stream: bool
) -> None:
    rig = make_rig(tool_parser="hermes", reasoning_parser="think")
    documented = await started(rig, CALLS)
    for path, body in REQUESTS:
        options: dict[str, Any] = {}
        if stream:
            if "count" in path or "token" in path or "prompt_logprobs" in body:
                continue
            options["stream"] = True
            if "completions" in path:
                options["stream_options"] = {"include_usage": True}
        status, answer = await documented.call("POST", path, body | options)
        assert status == 200, (path, body)
        assert not stream or len(answer) > 2


async def test_other_responses_have_the_documented_schemas(rig: GatewayRig) -> None:
    documented = await started(rig)
    for path in ("/", "/health", "/ready", "/version", "/v1/models"):
        assert (await documented.call("GET", path))[0] == 200
    assert (await documented.call("GET", "/v1/models/m", template="/v1/models/{model}"))[0] == 200
    _, response = await documented.call("POST", "/v1/responses", {"input": "hi"})
    kept = f"/v1/responses/{response['id']}"
    for method in ("GET", "DELETE"):
        assert (await documented.call(method, kept, template="/v1/responses/{response}"))[0] == 200


async def test_errors_have_the_documented_schemas(rig: GatewayRig) -> None:
    documented = await started(rig)
    for method, path, expected, body in FAILING:
        template = re.sub("/models/.*", "/models/{model}", path)
        template = re.sub("/responses/.*", "/responses/{response}", template)
        assert (await documented.call(method, path, body, template))[0] == expected, path
    rig.engines[0].refuse = (ErrorCode.OVERLOADED, "too many requests")
    for path, body in REQUESTS:
        if path.startswith("/v1") and "count" not in path:
            assert (await documented.call("POST", path, body))[0] == 429
    rig.gateway.admission.is_closed = True
    for path, body in REQUESTS:
        assert (await documented.call("POST", path, body))[0] == 503
    assert (await documented.call("GET", "/ready"))[0] == 503


async def test_a_failed_stream_ends_with_a_documented_event(rig: GatewayRig) -> None:
    documented = await started(rig, "hello world, the quick brown fox")
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "go"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", CHAT | {"max_tokens": 50}),
    ):
        rig.engines[0].planned_errors.append((2, ErrorCode.INTERNAL))
        status, events = await documented.call("POST", path, body | {"stream": True})
        assert status == 200
        assert "error" in events[-1]


async def test_keys_are_documented(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_delays, "BURST", 100)
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "team").write_text("key-of-the-team-1")
    rig = make_rig(access=AccessConfig(api_keys_dir=str(keys)))
    documented = await started(rig, key="key-of-the-team-1")
    document = documented.document
    assert [*document["components"]["securitySchemes"]] == ["bearer", "api_key"]
    without_key = Documented(rig, document)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "parameters":
                continue
            is_open = operation.get("security") == []
            assert is_open == (path in OPEN_PATHS)
            assert is_open == ("401" not in operation["responses"])
            status, _ = await without_key.call(method.upper(), path)
            assert (status == 401) == (not is_open)


def test_fields_that_are_not_supported_must_be_empty() -> None:
    documented = Documented(None, DOCUMENT)  # type: ignore[arg-type]
    schema = {"$ref": "#/components/schemas/ChatCompletionRequest"}
    documented.validate(CHAT | {"audio": None, "functions": []}, schema)
    with pytest.raises(jsonschema.ValidationError):
        documented.validate(CHAT | {"audio": {"voice": "x"}}, schema)


def test_fields_have_their_descriptions_and_bounds() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    fields = schemas["ChatCompletionRequest"]["properties"]
    assert fields["temperature"]["description"].startswith("Randomness of sampling.")
    numbers = {name: fields[name]["anyOf"][0] for name in ("n", "top_p", "logit_bias")}
    assert numbers == {
        "n": {"type": "integer", "minimum": 1, "maximum": MAX_N},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "logit_bias": {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    }
    # Zero is allowed with `echo`.
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["anyOf"][0] == {
        "type": "integer"
    }


def test_responses_have_the_fields_that_are_always_sent() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    detail, chunk = schemas["ErrorDetail"], schemas["ChatCompletionChunk"]
    assert set(detail["required"]) == {"message", "type", "param", "code"}
    assert "usage" not in chunk["required"]
    assert chunk["properties"]["object"]["const"] == "chat.completion.chunk"
    assert schemas["ChatMessage"]["required"] == ["role"]


@pytest.mark.parametrize("task", Task)
async def test_the_examples_succeed(rig: GatewayRig, task: Task) -> None:
    documented = await started(rig, task=task)
    bodies = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, methods in documented.document["paths"].items()
        if "post" in methods
    }
    assert len(bodies) >= 10
    for path, body in bodies.items():
        tasks = OPERATIONS["POST", path].tasks
        status = 200 if not tasks or task in tasks else 400
        assert (await documented.call("POST", path, body))[0] == status


#: Fields with the values that a comment lists: the struct, and a body with the field as `X`.
CLOSED: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("ChatMessage", "role", ChatCompletionRequest, {"messages": [{"role": "X", "content": "a"}]}),
    (
        "ContentPart",
        "type",
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": [{"type": "X", "text": "a"}]}]},
    ),
    (
        "ToolCall",
        "type",
        ChatCompletionRequest,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "X", "function": {"name": "f", "arguments": "{}"}}],
                }
            ]
        },
    ),
    (
        "ResponseFormat",
        "type",
        CompletionRequest,
        {"prompt": "a", "response_format": {"type": "X", "json_schema": {"schema": {}}}},
    ),
    ("InputMessage", "role", MessagesRequest, {"messages": [{"role": "X", "content": "a"}, USER]}),
    ("MessagesTool", "type", MessagesRequest, CHAT | {"tools": [{"type": "X", "name": "f"}]}),
    (
        "OutputFormat",
        "type",
        MessagesRequest,
        CHAT | {"output_format": {"type": "X", "schema": {}}},
    ),
    (
        "Thinking",
        "type",
        MessagesRequest,
        CHAT | {"thinking": {"type": "X"}},
    ),
    (
        "ToolChoice",
        "type",
        MessagesRequest,
        CHAT | {"tools": [{"name": "f"}], "tool_choice": {"type": "X", "name": "f"}},
    ),
    (
        "InputItem",
        "type",
        ResponsesRequest,
        {
            "input": [
                {
                    "type": "X",
                    "id": "kept",
                    "role": "user",
                    "content": [],
                    "name": "f",
                    "output": "a",
                }
            ]
        },
    ),
    ("InputItem", "role", ResponsesRequest, {"input": [{"role": "X", "content": "a"}]}),
    (
        "ResponseTool",
        "type",
        ResponsesRequest,
        {"input": "a", "tools": [{"type": "X", "name": "f"}]},
    ),
    (
        "TextFormat",
        "type",
        ResponsesRequest,
        {"input": "a", "text": {"format": {"type": "X", "schema": {}}}},
    ),
    ("ResponsesRequest", "truncation", ResponsesRequest, {"input": "a", "truncation": "X"}),
]


#: Items and responses that a request of /v1/responses may refer to.
EARLIER = b'{"responses": [{"output": [{"id": "kept", "role": "user", "content": "x"}]}]}'


def check_all(body: bytes, kind: Any) -> None:
    """Raise RequestError if a field is invalid."""
    request = parse_request(body, kind)
    if isinstance(request, ResponsesRequest):
        request.chat_request(EARLIER)
    elif isinstance(request, MessagesRequest):
        request.chat_request()


@pytest.mark.parametrize(("struct", "field", "kind", "body"), CLOSED)
def test_values_are_those_of_the_checks(
    struct: str, field: str, kind: Any, body: dict[str, Any]
) -> None:
    schema = DOCUMENT["components"]["schemas"][struct]["properties"][field]
    values = schema.get("anyOf", [schema])[0]["enum"]
    template = msgspec.json.encode({"max_tokens": 5, **body})
    for value in values:
        check_all(template.replace(b'"X"', msgspec.json.encode(value)), kind)
    with pytest.raises(RequestError) as raised:
        check_all(template, kind)
    assert str(raised.value.param).endswith(field) or raised.value.param == "response_format"


def test_all_lists_of_values_are_compared() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    closed = {
        (struct, field)
        for struct, schema in schemas.items()
        for field, value in schema["properties"].items()
        for branch in value.get("anyOf", [value])
        if "enum" in branch and branch.get("type") == "string"
    }
    assert closed == {(struct, field) for struct, field, _, _ in CLOSED}


async def test_requests_at_once_make_the_document_once(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    def make(*, needs_key: bool) -> dict[str, Any]:
        made.append(needs_key)
        return make_document(needs_key=needs_key)

    monkeypatch.setattr(document, "make_document", make)
    await rig.start()

    async def get() -> int:
        async with http_session() as session, session.get(f"{rig.url}/openapi.json") as response:
            await response.read()
            return response.status

    assert await asyncio.gather(*(get() for _ in range(8))) == [200] * 8
    assert made == [False]
