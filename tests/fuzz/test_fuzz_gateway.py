"""Random HTTP requests to a gateway with a small engine. See support/fuzz/fuzz_target.py."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.options.config import (
    ENGINE_HTTP_PORT,
    GATEWAY_METRICS_PORT,
    GATEWAY_PORT,
    AccessConfig,
    SchedulerConfig,
)
from support.fuzz.fuzz_target import TIMEOUT_S, FuzzTarget
from support.fuzz.http_cases import HTTPCases
from support.fuzz.http_client import HTTPFuzzer
from support.pods import Pod, Pods, pods
from support.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT_S)
API_KEY = "key-of-the-fuzzer"
#: A short context bounds the work of requests without max_tokens.
MAX_MODEL_LEN = 64

SAMPLING: dict[str, Any] = {
    "model": "m",
    "n": 2,
    "best_of": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "seed": 7,
    "max_tokens": 4,
    "min_tokens": 1,
    "stop": ["x", "yz"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5, "6": -100},
    "return_token_ids": True,
    "priority": 1,
    "data_parallel_rank": 0,
    "cache_salt": "salt",
    "bad_words": ["word"],
    "allowed_token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9],
    "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
SHORT: dict[str, Any] = {"model": "m", "max_tokens": 2}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
}
JSON_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
}
BODIES: list[tuple[str, str, Any]] = [
    *(
        ("POST", "/v1/completions", {**SHORT, "prompt": "hello world", **extra})
        for extra in (
            {},
            SAMPLING,
            {"prompt": ["a", "b"], "n": 2, "logprobs": 3, "echo": True, "prompt_logprobs": 2},
            {"prompt": [[1, 2, 3], [4, 5]], "add_special_tokens": False, "stream": True},
            {"prompt": [1, 2, 3], "use_beam_search": True, "n": 2, "length_penalty": 1.0},
            {"use_beam_search": True, "early_stopping": True, "best_of": 3, "temperature": 0},
            {"guided_json": SCHEMA},
            {"guided_regex": "[a-c]{2,4}"},
            {"guided_choice": ["yes", "no"]},
            {"guided_grammar": 'start: "a" | "b"'},
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"regex": "a+"}, "stream": True},
            {"structured_outputs": {"json_object": True}},
            {"response_format": JSON_FORMAT},
        )
    ),
    *(
        ("POST", "/v1/chat/completions", {**SHORT, **CHAT, **extra})
        for extra in (
            {},
            SAMPLING,
            {"logprobs": True, "top_logprobs": 3, "max_completion_tokens": 3},
            {"chat_template_kwargs": {"x": 1}, "add_generation_prompt": False},
            {"response_format": JSON_FORMAT, "stream": True},
            {"response_format": {"type": "json_object"}},
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        )
    ),
    *(
        ("POST", "/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 2, **extra})
        for extra in (
            {},
            {"stream": True, "instructions": "be brief", "store": False, "temperature": 0.5},
            {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "top_p": 0.5},
            {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}, "metadata": {"a": "b"}},
            {"reasoning": {"effort": "low"}, "previous_response_id": "resp_1"},
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "x"},
                ]
            },
        )
    ),
    *(
        ("POST", path, {**SHORT, "messages": [{"role": "user", "content": "hi"}], **extra})
        for path in ("/v1/messages", "/v1/messages/count_tokens")
        for extra in (
            {"system": "be brief", "stop_sequences": ["x"], "top_k": 5, "temperature": 0.5},
            {"stream": True, "thinking": {"type": "enabled", "budget_tokens": 5}},
            {
                "tools": [{"name": "f", "input_schema": SCHEMA, "description": "x"}],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            },
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "x", "signature": ""},
                            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}],
                    },
                ]
            },
        )
    ),
    ("POST", "/tokenize", {"model": "m", "prompt": "hello", "return_token_strs": True}),
    ("POST", "/tokenize", {**CHAT, "chat_template_kwargs": {"x": 1}, "add_special_tokens": True}),
    ("POST", "/detokenize", {"model": "m", "tokens": [1, 2, 3]}),
]
PATHS = ("/v1/models", "/v1/models/m", "/health", "/ready", "/metrics", "/version")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with pods(tmp_path_factory.mktemp("gateway"), 20) as group:
        yield group


@pytest.fixture(scope="module")
def engine(group: Pods, checkpoint: Path) -> Pod:
    engine = group.engine(
        "engine",
        checkpoint,
        scheduler=SchedulerConfig(max_num_seqs=64),
        max_model_len=MAX_MODEL_LEN,
    )
    engine.wait_ready(ENGINE_HTTP_PORT)
    return engine


@pytest.fixture(scope="module")
def gateway(group: Pods, engine: Pod, checkpoint: Path, tmp_path_factory: Any) -> Pod:
    keys = tmp_path_factory.mktemp("keys")
    (keys / "fuzzer").write_text(API_KEY)
    gateway = group.gateway(
        "gateway", checkpoint, {engine: "decode"}, access=AccessConfig(api_keys_dir=str(keys))
    )
    gateway.wait_ready(GATEWAY_PORT)
    return gateway


def complete(gateway: Pod) -> list[int]:
    """Return the token ids of a greedy completion."""
    body = {"prompt": "hello world", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{gateway.address}:{GATEWAY_PORT}/v1/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        token_ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    assert len(token_ids) == 8
    return token_ids


def count_statuses(gateway: Pod) -> dict[str, float]:
    """Return the number of requests by status, from the gateway's metrics."""
    counts: dict[str, float] = {}
    for line in gateway.get(GATEWAY_METRICS_PORT, "/metrics")[1].splitlines():
        if line.startswith("baton:http_requests_total{"):
            status = line.split('status="')[1].split('"')[0]
            counts[status] = counts.get(status, 0) + float(line.split()[-1])
    return counts


def test_gateway(gateway: Pod, engine: Pod) -> None:
    expected = complete(gateway)

    def is_right() -> None:
        assert complete(gateway) == expected

    def is_idle() -> bool:
        return gateway.metric("baton:requests_in_flight", GATEWAY_METRICS_PORT) == 0

    target = FuzzTarget(gateway, "gateway", engine)
    key = (b"Authorization", b"Bearer " + API_KEY.encode())
    fuzzer = HTTPFuzzer(target, GATEWAY_PORT, HTTPCases(BODIES, PATHS, [key]), allowed={503})
    with target.checking(is_right):
        asyncio.run(fuzzer.run())
        eventually(is_idle, what="no request in flight", timeout_s=120.0)
    counts = count_statuses(gateway)
    failed = {status: count for status, count in counts.items() if status in ("500", "502", "504")}
    assert not failed, f"streams failed: {failed}\n{gateway.tail()}"
    assert all(counts.get(str(status)) for status in (200, 400, 415)), counts
