"""Large requests do not delay others. Requests that cannot fit are refused early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_gateway import thread_pool
from baton_gateway.endpoints.writers import completion_writer
from baton_gateway.http import request_body
from baton_gateway.http.request_body import MAX_CONTAINERS, MAX_VALUES
from baton_gateway.requests import prompts
from baton_gateway.requests.generator import STAGGERED_TOKENS
from baton_gateway.requests.prompts import TEXT_FACTOR
from baton_gateway.routing.dispatcher import Dispatcher
from baton_gateway.thread_pool import (
    NUM_TEMPLATE_THREADS,
    SMALL_BYTES,
    run_template,
)
from baton_protocol.options.config import AccessConfig
from baton_text.output import OutputProcessor
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.tokenize_requests import DetokenizeRequest, TokenizeRequest
from support.gateway.fake_engine import DEADLINE_S
from support.gateway.gateway_rig import GatewayRig, MakeRig
from support.waiting import until

TEXT = {"model": "m", "prompt": "hi"}
LONG = "hello world, the quick brown fox " * 1000
MESSAGES = [{"role": "user", "content": "a"}] * 3000
LONG_IDS = [5] * 25_000
WITH_LOGPROBS = {"max_tokens": 200, "logprobs": 10}


class BlockedFunction:
    """Patches a function so that its calls block until `released`. Calls on the event loop fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()
        function: Callable[..., Any] = getattr(owner, name)
        loop_thread = threading.get_ident()

        def held(*args: Any, **options: Any) -> Any:
            assert threading.get_ident() != loop_thread, (
                f"{name} must not be called on the event loop"
            )
            self.entered.set()
            assert self.released.wait(DEADLINE_S), "`released` was not set"
            return function(*args, **options)

        monkeypatch.setattr(owner, name, held)


def large_rig(make_rig: MakeRig, **config: Any) -> GatewayRig:
    """Return a gateway whose engine accepts long prompts and answers with 300 tokens."""
    rig = make_rig(**config)
    engine = rig.engine("d", "decode")
    engine.answer, engine.max_model_len, engine.tokens_per_output = [5] * 300, 100_000, 50
    return rig


WORK = [
    ("parsing", request_body, "parse_request", "/v1/completions", TEXT | {"prompt": LONG * 3}),
    ("parsing texts", request_body, "parse_request", "/tokenize", {"prompt": LONG * 3}),
    (
        "checking messages",
        ChatCompletionRequest,
        "validate",
        "/v1/chat/completions",
        {"messages": MESSAGES},
    ),
    ("checking ids", CompletionRequest, "prompts", "/v1/completions", TEXT | {"prompt": LONG_IDS}),
    ("rendering", "chat_template", "render", "/v1/chat/completions", {"messages": MESSAGES}),
    ("tokenizing a chat", "tokenizer", "encode", "/v1/chat/completions", {"messages": MESSAGES}),
    ("tokenizing a prompt", "tokenizer", "encode", "/v1/completions", TEXT | {"prompt": LONG}),
    (
        "checking options",
        CompletionRequest,
        "sampling_params",
        "/v1/completions",
        TEXT | {"allowed_token_ids": LONG_IDS},
    ),
    ("rendering texts", "chat_template", "render", "/tokenize", {"messages": MESSAGES}),
    ("tokenizing texts", "tokenizer", "encode", "/tokenize", {"prompt": LONG}),
    (
        "token strings",
        "tokenizer",
        "token_text",
        "/tokenize",
        {"prompt": LONG, "return_token_strs": True},
    ),
    ("detokenizing", "tokenizer", "decode", "/detokenize", {"tokens": LONG_IDS}),
    (
        "logprobs",
        completion_writer,
        "completion_logprobs",
        "/v1/completions",
        TEXT | WITH_LOGPROBS,
    ),
    (
        "beams",
        OutputProcessor,
        "push_beam",
        "/v1/completions",
        TEXT | {"n": 4, "use_beam_search": True, "max_tokens": 200},
    ),
    (
        "a chunk",
        completion_writer,
        "completion_logprobs",
        "/v1/completions",
        TEXT | {"prompt": [5] * 4000, "echo": True, "logprobs": 5, "max_tokens": 1, "stream": True},
    ),
]


@pytest.mark.parametrize(
    ("owner", "name", "path", "body"),
    [pytest.param(*case[1:], id=case[0]) for case in WORK],
)
async def test_other_requests_are_served_while_a_large_one_is_processed(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    path: str,
    body: dict[str, Any],
) -> None:
    rig = large_rig(make_rig)
    await rig.start(*rig.engines)
    owner = {"tokenizer": rig.tokenizer, "chat_template": rig.tokenizer.chat_template}.get(
        owner, owner
    )
    held = BlockedFunction(monkeypatch, owner, name)
    sending = asyncio.create_task(post(rig, path, {"model": "m"} | body))
    await until(lambda: held.entered.is_set() or sending.done(), f"{name} called")
    assert not sending.done(), sending.result()
    assert (await rig.get("/health"))[0] == 200
    assert "baton:" in await rig.scrape()
    assert not sending.done()
    held.released.set()
    status, answer = await sending
    assert status == 200, answer


async def post(rig: GatewayRig, path: str, body: dict[str, Any]) -> tuple[int, object]:
    if body.get("stream"):
        return 200, await rig.events(path, body)
    status, answer, _ = await rig.post(path, body)
    return status, answer


async def test_large_requests_get_the_same_responses_as_small_ones(make_rig: MakeRig) -> None:
    rig = large_rig(make_rig)
    await rig.start(*rig.engines)
    ids = rig.tokenizer.encode(LONG)
    _, body, _ = await rig.post("/tokenize", {"prompt": LONG, "return_token_strs": True})
    assert (body["tokens"], "".join(body["token_strs"]), body["max_model_len"]) == (
        ids,
        LONG,
        100_000,
    )
    _, body, _ = await rig.post("/detokenize", {"tokens": ids})
    assert body["prompt"] == LONG
    whole = (await rig.post("/v1/completions", TEXT | WITH_LOGPROBS))[1]["choices"][0]["logprobs"]
    assert (len(whole["tokens"]), len(whole["top_logprobs"][199])) == (200, 10)
    assert rig.engines[0].adds[-1].prompt_token_ids == rig.tokenizer.encode("hi")


class Spy:
    """Records the sizes of a function's first arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.sizes: list[int] = []
        function: Callable[..., Any] = getattr(owner, name)

        def spied(given: Any, *args: Any, **options: Any) -> Any:
            self.sizes.append(len(given))
            return function(given, *args, **options)

        monkeypatch.setattr(owner, name, spied)


async def test_more_messages_than_the_model_length_are_not_rendered(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(rig.engine("d", "decode"))
    spy = Spy(monkeypatch, rig.tokenizer.chat_template, "render")
    limit = rig.engines[0].max_model_len
    for path, number, code in (
        ("/v1/chat/completions", limit, "context_length_exceeded"),
        ("/tokenize", TEXT_FACTOR * limit + 1, "prompt_too_long"),
    ):
        many = {"messages": [{"role": "user", "content": ""}] * number}
        error = await rig.refused(path, {"model": "m"} | many)
        assert (error["code"], error["param"]) == (code, "messages")
    assert not spy.sizes


@pytest.mark.parametrize(("path", "factor"), [("/v1/completions", 1), ("/tokenize", TEXT_FACTOR)])
async def test_tokenization_of_a_text_stops_when_it_has_too_many_tokens(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch, path: str, factor: int
) -> None:
    engine = rig.engine("d", "decode")
    engine.max_model_len = 4096
    await rig.start(engine)
    most = 4096 * factor
    words, short = "<|endoftext|>" * (most - 20), "zq" * 6 * most
    assert len(short) < len(words), "the text must be short enough to be tokenized"
    spy = Spy(monkeypatch, rig.tokenizer, "encode")
    code = "context_length_exceeded" if factor == 1 else "prompt_too_long"
    error = await rig.refused(path, {"model": "m", "prompt": short})
    assert (error["code"], error["param"]) == (code, "prompt")
    assert sum(spy.sizes) < len(short)
    status, answer, _ = await rig.post(path, {"model": "m", "prompt": words})
    assert status == 200, answer
    usage = answer.get("usage", {"prompt_tokens": answer.get("count")})
    assert usage["prompt_tokens"] == most - 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[1]] * MAX_CONTAINERS}),
        ("/v1/completions", {"prompt": "hi", "guided_json": {"a": [1] * (MAX_VALUES + 300)}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * MAX_CONTAINERS}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * MAX_CONTAINERS}),
        ("/detokenize", {"tokens": [5] * (MAX_VALUES + 300)}),
    ],
)
async def test_a_body_of_too_many_values_is_not_parsed(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    await rig.start(rig.engine("d", "decode"))
    spy = Spy(monkeypatch, request_body, "parse_request")
    error = await rig.refused(path, {"model": "m"} | body)
    assert (error["code"], spy.sizes) == ("request_too_large", [])


async def test_punctuation_in_texts_does_not_count_as_values(rig: GatewayRig) -> None:
    await rig.start(rig.engine("d", "decode"))
    for text in ("[{,:" * 2**19, '"\\' * MAX_VALUES, ',"' * MAX_VALUES):
        error = await rig.refused("/v1/completions", {"model": "m", "prompt": text})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (TokenizeRequest, "/tokenize", {"prompt": LONG}),
        (DetokenizeRequest, "/detokenize", {"tokens": LONG_IDS}),
    ],
)
async def test_tokenization_counts_as_a_running_request(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: type,
    path: str,
    body: dict[str, Any],
) -> None:
    (tmp_path / "ann").write_text("a-long-key-of-ann")
    (tmp_path / "bob").write_text("a-long-key-of-bob")
    rig = large_rig(
        make_rig,
        max_concurrent_requests=2,
        access=AccessConfig(api_keys_dir=str(tmp_path), max_concurrent_per_client=1),
    )
    await rig.start(*rig.engines)
    ann, bob = (
        {"headers": {"Authorization": f"Bearer a-long-key-of-{name}"}} for name in ("ann", "bob")
    )
    held = BlockedFunction(monkeypatch, kind, "validate")
    large = body | ({"prompt": LONG * 3} if "prompt" in body else {"tokens": [5] * 50_000})
    first = asyncio.create_task(rig.post(path, large, **ann))
    await until(held.entered.is_set, "the first request to be processed")
    for other in (path, "/v1/completions"):
        status, answer, headers = await rig.post(other, TEXT | {"tokens": [5]}, **ann)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["Retry-After"]) > 0
    second = asyncio.create_task(rig.post(path, large, **bob))
    held.released.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]
    status, _, _ = await rig.post("/v1/completions", TEXT, **ann)
    assert status == 200, "an ended request still counts"


async def test_options_are_checked_once_for_all_prompts(
    rig: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(rig.engine("d", "decode"))
    calls: list[int] = []
    function = CompletionRequest.sampling_params

    def counted(request: CompletionRequest, **options: Any) -> Any:
        calls.append(options["max_tokens"])
        return function(request, **options)

    monkeypatch.setattr(CompletionRequest, "sampling_params", counted)
    status, answer, _ = await rig.post(
        "/v1/completions", TEXT | {"prompt": ["a", "b c", "d"] * 5, "max_tokens": 3}
    )
    assert (status, len(answer["choices"]), calls) == (200, 15, [3])
    seeds = {request.sampling_params.seed for request in rig.engines[0].adds}
    assert len(seeds) == 15, "prompts share a seed"


@pytest.mark.parametrize(
    ("prompts", "options"),
    [(40, {"allowed_token_ids": LONG_IDS}), (40, {}), (2, {"n": 20})],
    ids=["options", "prompts", "n"],
)
async def test_large_sequences_are_sent_in_several_event_loop_iterations(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, prompts: int, options: dict[str, Any]
) -> None:
    rig = large_rig(make_rig)
    await rig.start(*rig.engines)
    turn, turns_of_adds = 0, []
    loop = asyncio.get_running_loop()

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(next_turn)

    function = Dispatcher.generate

    def generate(dispatcher: Dispatcher, sequence: Any) -> Any:
        turns_of_adds.append(turn)
        return function(dispatcher, sequence)

    monkeypatch.setattr(Dispatcher, "generate", generate)
    next_turn()
    status, _, _ = await rig.post(
        "/v1/completions", TEXT | options | {"prompt": [[5] * 5000] * prompts, "max_tokens": 1}
    )
    assert (status, len(turns_of_adds)) == (200, 40)
    assert max(map(turns_of_adds.count, turns_of_adds)) <= STAGGERED_TOKENS // 5000 + 1


async def test_small_chats_do_not_wait_for_the_templates_of_large_ones(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = large_rig(make_rig)
    await rig.start(*rig.engines)
    render, released = rig.tokenizer.chat_template.render, threading.Event()  # type: ignore[union-attr]

    def held(messages: Any, **variables: Any) -> str:
        assert "large" not in variables or released.wait(DEADLINE_S), "`released` was not set"
        return render(messages, **variables)

    started: list[int] = []

    async def run(*args: Any) -> Any:
        started.append(1)
        return await run_template(*args)

    monkeypatch.setattr(rig.tokenizer.chat_template, "render", held)
    monkeypatch.setattr(prompts, "run_template", run)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    large = chat | {"chat_template_kwargs": {"large": "a" * SMALL_BYTES}}
    async with asyncio.TaskGroup() as tasks:
        posts = [tasks.create_task(rig.post("/v1/chat/completions", large)) for _ in range(5)]
        try:
            await until(lambda: len(started) == len(posts), "the large requests wait or run")
            assert (await rig.post("/v1/chat/completions", chat))[0] == 200
            assert not any(post.done() for post in posts)
        finally:
            released.set()
    assert [post.result()[0] for post in posts] == [200] * 5


async def test_a_template_does_not_outlast_the_deadline_of_its_request(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = large_rig(make_rig, request_timeout_s=0.5)
    await rig.start(*rig.engines)
    blocked = BlockedFunction(monkeypatch, rig.tokenizer.chat_template, "render")
    try:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        status, answer, _ = await rig.post("/v1/chat/completions", chat)
        assert (status, answer["error"]["code"]) == (504, "timeout")
    finally:
        blocked.released.set()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_the_wait_for_a_thread_of_the_template_has_a_deadline(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    monkeypatch.setattr(thread_pool, "TEMPLATE_TIMEOUT_S", 0.2)
    rig = large_rig(make_rig)
    await rig.start(*rig.engines)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    blocked = BlockedFunction(monkeypatch, rig.tokenizer.chat_template, "render")
    try:
        # One more than there are threads, so that one waits.
        posts = [rig.post(path, chat) for _ in range(NUM_TEMPLATE_THREADS + 1)]
        for status, answer, headers in await asyncio.gather(*posts):
            assert (status, answer["error"]["code"]) == (503, "service_unavailable")
            assert "The chat templates of other requests" in answer["error"]["message"]
            assert int(headers["Retry-After"]) > 0
    finally:
        blocked.released.set()
    assert "a chat request was not rendered within 0.2 s" in caplog.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_messages_that_cannot_fit_are_refused_before_they_are_rendered(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    rig = make_rig()
    await rig.start(rig.engine("d", "decode"))

    def fail(*_: Any, **__: Any) -> str:
        raise AssertionError("the messages are rendered")

    monkeypatch.setattr(rig.tokenizer.chat_template, "render", fail)
    content: Any
    for content in (LONG, [{"type": "text", "text": LONG}]):
        status, answer, _ = await rig.post(
            path, {"messages": [{"role": "user", "content": content}]}
        )
        assert (status, answer["error"]["param"]) == (400, "messages")
