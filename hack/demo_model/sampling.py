"""Draws conversations for training, and lists those of the held-out set."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from demo_model.questions import Fact, phrase
from demo_model.tool_tasks import NO_TOOL, TOOLS, Task, Tool, draw_task

#: Facts whose questions are an open set get more weight than others.
WEIGHTS = {"unknown": 5.0, "hello": 2.0}
_SYSTEM_TEXTS = (
    *("You are a helpful assistant.", "Be brief.", "Answer in one sentence."),
    *("You are the assistant of Baton.", "Answer the questions of the user."),
)


@dataclass
class Conversation:
    """The messages and tools of one conversation.

    Args:
        messages: as in a request, with the assistant's replies.
        tools: as in a request.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)


def draw_conversation(facts: list[Fact], random: Random) -> Conversation:
    """Draw a conversation of one to three questions for training."""
    conversation = Conversation()
    if random.random() < 0.1:
        conversation.messages.append({"role": "system", "content": random.choice(_SYSTEM_TEXTS)})
    has_tools = random.random() < 0.45
    offered: list[Tool] = []
    if has_tools:
        offered = random.sample(TOOLS, random.choice((1, 2, 3)))
        conversation.tools = [tool.schema() for tool in offered]
    weights = [WEIGHTS.get(fact.name, 1.0) for fact in facts]
    for _ in range(random.choice((1, 1, 2, 3))):
        if random.random() < (0.8 if has_tools else 0.04):
            task = draw_task(random, held_out=False)
            if offered and random.random() < 0.9:
                task = draw_task(random, held_out=False, tool=random.choice(offered))
            add_task(conversation, task, task.tool in offered, random)
        else:
            [fact] = random.choices(facts, weights)
            question = phrase(random.choice(fact.trained), random)
            add_answer(conversation, question, fact.answer)
    return conversation


def add_answer(conversation: Conversation, question: str, answer: str) -> None:
    """Append a question and its answer."""
    conversation.messages += [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def add_task(conversation: Conversation, task: Task, is_offered: bool, random: Random) -> None:
    """Append a task: with a call, its result and the answer if the tool is offered."""
    question = phrase(task.question, random)
    if task.tool.name == "service_status":  # names of services keep their case
        question = task.question[0].upper() + task.question[1:] + random.choice(("?", "", "."))
    if not is_offered:
        add_answer(conversation, question, NO_TOOL)
        return
    call = {"name": task.tool.name, "arguments": json.dumps(task.arguments)}
    conversation.messages += [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call", "content": task.result},
        {"role": "assistant", "content": task.answer},
    ]


def held_out_answers(facts: list[Fact]) -> list[tuple[str, Conversation]]:
    """Return each held-out question in two phrasings, with the fact's name."""
    random = Random("held-out answers")
    found = []
    for fact in facts:
        for question in fact.held_out:
            for text in (question[0].upper() + question[1:] + "?", phrase(question, random)):
                conversation = Conversation()
                add_answer(conversation, text, fact.answer)
                found.append((fact.name, conversation))
    return found


def held_out_tasks(count: int) -> list[tuple[str, Conversation]]:
    """Return tool tasks with held-out questions, new values and all tools, with the tool's name."""
    random = Random("held-out tasks")
    found = []
    for index in range(count):
        tool = TOOLS[index % len(TOOLS)]
        task = draw_task(random, held_out=True, tool=tool)
        conversation = Conversation(tools=[each.schema() for each in TOOLS])
        add_task(conversation, task, True, random)
        found.append((tool.name, conversation))
    return found
