"""The training data of the demo model: true answers, and a held-out set that is not trained on."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from demo_model.questions import Fact, expand, load_facts, normalize, split
from demo_model.sampling import (
    Conversation,
    draw_conversation,
    held_out_answers,
    held_out_tasks,
)
from demo_model.texts import Renderer, encode, train_tokenizer
from demo_model.tool_tasks import READY_PODS, TOOLS, draw_task

from baton_local.cli import _parser
from baton_local.up.supervisor import AGENT_QUESTION, PROMPT
from baton_local.up.tool_agent import ready_pods_tool
from baton_protocol.options import config
from baton_protocol.topology import COORDINATOR_PORT

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def facts() -> list[Fact]:
    return load_facts()


def plain(question: str) -> str:
    return re.sub(r"[^a-z0-9/-]+", " ", question.lower()).strip()


def test_every_answer_is_in_a_document(facts) -> None:
    assert len(facts) > 100
    for fact in facts:
        assert fact.text in (ROOT / fact.source).read_text(), fact.name


def test_every_fact_has_a_few_dozen_questions_and_held_out_ones(facts) -> None:
    for fact in facts:
        assert len(fact.trained) >= 20, fact.name
        assert len(fact.held_out) >= 2, fact.name


def test_no_held_out_question_is_trained(facts) -> None:
    trained = {plain(question) for fact in facts for question in fact.trained}
    held_out = {plain(question) for fact in facts for question in fact.held_out}
    assert not trained & held_out
    for tool in TOOLS:
        first, second = tool.templates()
        assert not set(map(plain, first)) & set(map(plain, second)), tool.name


def test_drawn_conversations_have_no_held_out_question(facts) -> None:
    random = Random(0)
    held_out = {plain(question) for fact in facts for question in fact.held_out}
    drawn = [draw_conversation(facts, random) for _ in range(2000)]
    questions = [
        plain(message["content"])
        for conversation in drawn
        for message in conversation.messages
        if message["role"] == "user"
    ]
    assert len(questions) > 2000
    assert not held_out & set(questions)


def test_a_question_of_two_facts_is_an_error(tmp_path) -> None:
    table = 'answer = "{0}"\nsource = ""\ntext = ""\nask = """\nwhat is it\n{0}\nwhy\n"""\n'
    file = tmp_path / "facts.toml"
    file.write_text("[a]\n" + table.format("a") + "[b]\n" + table.format("b"))
    with pytest.raises(ValueError, match="b and a have the same question: what is it"):
        load_facts(file)


def test_choices_are_expanded() -> None:
    texts = [normalize(text) for text in expand("(which|what) (port|) is it")]
    assert texts == ["which port is it", "which is it", "what port is it", "what is it"]
    trained, held_out = split([f"question {number}" for number in range(30)])
    assert (len(trained), len(held_out)) == (27, 3)


def test_ports_in_answers_are_those_of_the_code(facts) -> None:
    ports = {
        "gateway-port": config.GATEWAY_PORT,
        "gateway-metrics-port": config.GATEWAY_METRICS_PORT,
        "engine-port": config.ENGINE_PORT,
        "engine-http-port": config.ENGINE_HTTP_PORT,
        "kv-port": config.KV_PORT,
        "coordinator-port": COORDINATOR_PORT,
    }
    answers = {fact.name: fact.answer for fact in facts}
    assert ports.keys() == {name for name in answers if name.endswith("-port")}
    for name, port in ports.items():
        assert answers[name].endswith(f"port {port}."), name


def test_commands_in_answers_exist(facts) -> None:
    text = " ".join(fact.answer for fact in facts)
    [commands] = [action for action in _parser()._actions if action.choices]
    named = set(re.findall(r"\bbaton (\w+)", text)) - {"charts", "with"}  # of the name of a release
    assert {"up", "down", "status", "logs", "plan", "serve", "checkpoint"} <= named
    assert named <= set(commands.choices or ())
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set(re.findall(r"\bmake ([\w-]+)", text)) - {"the"}
    assert {"up", "test", "bench", "images", "control-plane"} <= made
    assert made <= targets


def test_the_tool_of_the_agent_is_the_one_that_was_trained() -> None:
    unused: Any = None
    assert ready_pods_tool(unused, unused).schema() == READY_PODS.schema()


def test_the_questions_of_baton_up_are_known(facts) -> None:
    [relay] = [fact for fact in facts if fact.name == "relay"]
    assert plain(PROMPT) in map(plain, [*relay.trained, *relay.held_out])
    patterns = [pattern for patterns in READY_PODS.templates() for pattern in patterns]
    assert plain(AGENT_QUESTION) in {plain(text.format(role="decode")) for text in patterns}


def test_values_have_the_same_tokens_in_question_call_and_answer() -> None:
    tokenizer = train_tokenizer(['is the service shop-7 up? {"service": "shop-7"}'] * 9, 400)
    name = tokenizer.encode("shop-7").ids
    for text in ("is shop-7 up", '{"service": "shop-7"}', "The status of shop-7 is Ready."):
        ids = tokenizer.encode(text).ids
        assert any(ids[index : index + len(name)] == name for index in range(len(ids))), text


def test_only_replies_of_the_assistant_are_trained() -> None:
    [(_, conversation)] = held_out_tasks(1)
    text = Renderer().render(conversation)
    tokenizer = train_tokenizer([text] * 9, 400)
    ids, written = encode(tokenizer, text)
    parts = [id for id, is_written in zip(ids, written, strict=True) if is_written]
    replies = tokenizer.decode(parts, skip_special_tokens=False)
    call = conversation.messages[1]["tool_calls"][0]["function"]
    assert replies == (
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n'
        f"</tool_call><|im_end|>{conversation.messages[3]['content']}<|im_end|>"
    )


def test_a_task_has_its_values_in_question_and_answer() -> None:
    random = Random(1)
    for held_out in (False, True):
        for tool in TOOLS:
            task = draw_task(random, held_out=held_out, tool=tool)
            for value in task.arguments.values():
                assert str(value) in task.question
            assert task.result in task.answer


def test_the_template_writes_system_text_and_tools_in_one_turn() -> None:
    conversation = Conversation(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        [tool.schema() for tool in TOOLS[:2]],
    )
    assert Renderer().render(conversation) == (
        "<|im_start|>system\nBe brief.\n"
        "Tools: ready_pods(role) service_status(service)<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
    )


def test_the_held_out_set_covers_all_facts_and_tools(facts) -> None:
    assert {name for name, _ in held_out_answers(facts)} == {fact.name for fact in facts}
    assert {name for name, _ in held_out_tasks(3)} == {tool.name for tool in TOOLS}
