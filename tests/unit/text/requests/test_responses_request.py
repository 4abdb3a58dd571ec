"""Bodies of the Responses API become chat messages, in linear time."""

from __future__ import annotations

import json

import pytest

from baton_text.requests.parsing import parse_request
from baton_text.requests.responses_request import InputItem, ResponsesRequest


@pytest.mark.timeout(20)
def test_the_time_for_many_calls_is_linear() -> None:
    """130,000 calls took 18 s, in which other clients' large requests waited."""
    items = [InputItem(type="function_call", name="a")] * 130_000
    [message] = ResponsesRequest(input=items).input_messages()
    assert len(message.tool_calls or ()) == len(items)


def test_items_become_messages() -> None:
    body = {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "Hm."}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ]
    }
    messages = parse_request(json.dumps(body).encode(), ResponsesRequest).input_messages({})
    assert [message.role for message in messages] == ["developer", "user", "assistant", "tool"]
    assistant = messages[2]
    assert (assistant.content, assistant.reasoning_content) == ("I add.", "Hm.")
    assert assistant.tool_calls is not None
    assert [call.id for call in assistant.tool_calls] == ["c1", "c2"]
    assert messages[3].tool_call_id == "c1"
