"""The checkpoint of the demo model: small, trained on the present data, and accurate enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from demo_model.questions import load_facts
from demo_model.sampling import Conversation, held_out_answers, held_out_tasks
from train_demo_model import Data

from baton_engine import LLM
from baton_local.up.demo_model import DEMO_CHECKPOINT
from baton_local.up.supervisor import PROMPT

ROOT = Path(__file__).parents[3]
README = ROOT / "hack/demo_model/README.md"
NUM_ANSWERS, NUM_TASKS = 600, 150


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO_CHECKPOINT), max_model_len=512, max_num_seqs=64) as llm:
        yield llm


def replies(llm: LLM, conversations: list[list[dict[str, Any]]], tools: Any) -> list[str]:
    """Return the assistant's next message in each conversation, as the model writes it."""
    params = llm.get_default_sampling_params()
    params.max_tokens = 128
    outputs = llm.chat(conversations, params, use_tqdm=False, tools=tools or None)
    return [output.outputs[0].text for output in outputs]


def test_all_files_have_at_most_8_megabytes() -> None:
    assert sum(file.stat().st_size for file in DEMO_CHECKPOINT.iterdir()) <= 8_000_000
    config = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("qwen3", "bfloat16")


def test_the_checkpoint_was_trained_on_the_present_data() -> None:
    data = Data(load_facts(), seed=0)
    assert f"`{data.digest}`" in README.read_text(), (
        "the data of the demo model has changed: train it again (hack/demo_model/README.md)"
    )
    tokenizer = json.loads((DEMO_CHECKPOINT / "tokenizer.json").read_text())
    assert tokenizer == json.loads(data.tokenizer.to_str())
    template = (ROOT / "hack/demo_model/chat_template.jinja").read_text()
    assert (DEMO_CHECKPOINT / "chat_template.jinja").read_text() == template


def test_the_prompt_of_baton_up_gets_the_right_answer(llm) -> None:
    [relay] = [fact.answer for fact in load_facts() if fact.name == "relay"]
    assert replies(llm, [[{"role": "user", "content": PROMPT}]], None) == [relay]


def test_95_percent_of_held_out_questions_get_the_right_answer(llm) -> None:
    checked = Random(0).sample(held_out_answers(load_facts()), NUM_ANSWERS)
    found = replies(llm, [each.messages[:1] for _, each in checked], None)
    wrong = [
        (conversation.messages[0]["content"], reply)
        for (_, conversation), reply in zip(checked, found, strict=True)
        if reply != conversation.messages[1]["content"]
    ]
    assert len(wrong) <= 0.05 * NUM_ANSWERS, wrong


def test_90_percent_of_held_out_tool_tasks_get_the_right_call_and_answer(llm) -> None:
    tasks = [task for _, task in held_out_tasks(NUM_TASKS)]
    tools = tasks[0].tools
    calls = replies(llm, [task.messages[:1] for task in tasks], tools)
    answers = replies(llm, [task.messages[:3] for task in tasks], tools)
    wrong = [
        (task.messages[0]["content"], call, answer)
        for task, call, answer in zip(tasks, calls, answers, strict=True)
        if call != written_call(task) or answer != task.messages[3]["content"]
    ]
    assert len(wrong) <= 0.1 * NUM_TASKS, wrong


def written_call(task: Conversation) -> str:
    function = task.messages[1]["tool_calls"][0]["function"]
    return (
        f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n'
        "</tool_call>"
    )
