"""Questions that need a tool, with the call, the tool's result and the final answer.

The values are copied: arguments from the question, and results into the answer. Names are drawn
from an open set, so that the model learns to copy instead of learning names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from baton_local.up.tool_agent import tool_entry
from demo_model.questions import expand, normalize, split

Values = dict[str, Any]
#: Answer to a question for which the request offers no tool.
NO_TOOL = "I need a tool for that, and the request has none."
ROLES = ("prefill", "decode", "gateway")
STATUSES = (
    *("Ready", "NotReady", "NoCapacity", "ModelNotFound", "Paused", "InvalidSpec"),
    *("ScaledToZero", "RolloutStalled", "Loading", "Fetching", "Unknown", "Available"),
)
_WORDS = """
chat demo search shop mail blog news bank maps docs wiki code qwen llama mistral summary answers
support sales legal health music video photo books games store orders travel hotel
"""
_STARTS = "b c d f g h k l m n p r s t v w z br cl dr fl gr pl st tr"
_VOWELS = "a e i o u ai ee oo"


@dataclass(frozen=True)
class Tool:
    """A tool that the model can call.

    Args:
        name: name of the function.
        description: what it does.
        parameters: JSON schema of each argument.
        questions: patterns of questions; `{NAME}` is the value of an argument.
        draw: draws the arguments of a call.
        result: draws what the tool returns for these arguments.
        answer: pattern of the answer; `{result}` is the result.
    """

    name: str
    description: str
    parameters: dict[str, dict[str, Any]]
    questions: tuple[str, ...]
    draw: Callable[[Random], Values]
    result: Callable[[Values, Random], str]
    answer: str

    def schema(self) -> dict[str, Any]:
        """Return the tool as an entry of `tools` in a request."""
        return tool_entry(self.name, self.description, self.parameters)

    def templates(self) -> tuple[list[str], list[str]]:
        """Return the training questions and the held-out ones, with the names of arguments."""
        return split([normalize(text) for line in self.questions for text in expand(line)])


@dataclass(frozen=True)
class Task:
    """One question, the call that it needs, the result and the final answer."""

    tool: Tool
    question: str
    arguments: Values
    result: str
    answer: str


def draw_task(random: Random, *, held_out: bool, tool: Tool | None = None) -> Task:
    """Draw a task.

    Args:
        random: source of all choices.
        held_out: take a question that is not in the training set.
        tool: the tool of the task. None: any.
    """
    tool = tool or random.choice(TOOLS)
    arguments = tool.draw(random)
    question = random.choice(tool.templates()[held_out]).format(**arguments)
    result = tool.result(arguments, random)
    answer = tool.answer
    if tool is READY_PODS and result == "1":
        answer = answer.replace("pods are", "pod is")
    return Task(tool, question, arguments, result, answer.format(**arguments, result=result))


def draw_name(random: Random) -> str:
    """Draw the name of a service: a known word, an invented one, or several parts."""
    kind = random.random()
    if kind < 0.25:
        return random.choice(_WORDS.split())
    if kind < 0.6:
        return _invented(random)
    first = random.choice(_WORDS.split()) if random.random() < 0.5 else _invented(random)
    second = random.choice(
        (str(random.randrange(1, 100)), random.choice(_WORDS.split()), "dev", "prod")
    )
    return f"{first}-{second}"


def _invented(random: Random) -> str:
    count = random.choice((2, 2, 3))
    return "".join(
        random.choice(_STARTS.split()) + random.choice(_VOWELS.split()) for _ in range(count)
    )


def _number(random: Random) -> int:
    return random.randrange(10 ** random.choice((1, 2, 2, 3)))


def _sum(arguments: Values, random: Random) -> str:
    # Half of the results are wrong sums, so that the model copies the result.
    if random.random() < 0.5:
        return str(_number(random))
    return str(arguments["a"] + arguments["b"])


READY_PODS = Tool(
    "ready_pods",
    "Return the number of ready pods of a role.",
    {"role": {"type": "string", "enum": list(ROLES)}},
    (
        "how many {role} pods (are ready|are there|are running|do we have|are up|can serve|work)",
        "how many {role} pods does (the|this) (service|cluster) have",
        "(count|show) (me|) (the|all) (ready|running) {role} pods",
        "(what is|tell me|give me) the number of (ready|running|) {role} pods",
        "(is|are) any {role} (pod|pods) ready",
        "number of (ready|running|) {role} pods",
    ),
    lambda random: {"role": random.choice(ROLES)},
    lambda arguments, random: str(random.randrange(random.choice((5, 10, 100)))),
    "{result} {role} pods are ready.",
)
SERVICE_STATUS = Tool(
    "service_status",
    "Return the status of a service.",
    {"service": {"type": "string"}},
    (
        "is (the service|service|) {service} (ready|up|running|healthy)",
        "(what is|tell me|show me) the (status|state) of (the service|service|) {service}",
        "how is (the service|service|) {service} (doing|)",
        "does (the service|service|) {service} (work|serve)",
        "(check|look at) (the service|service|the status of) {service}",
        "(status|state) of (the service|service|) {service}",
    ),
    lambda random: {"service": draw_name(random)},
    lambda arguments, random: random.choice(STATUSES),
    "The status of {service} is {result}.",
)
ADD = Tool(
    "add",
    "Return the sum of two numbers.",
    {"a": {"type": "number"}, "b": {"type": "number"}},
    (
        "(what is|how much is|compute|calculate|what's|tell me) {a} (+|plus|and) {b}",
        "(add|sum|sum up|please add) {a} and {b}",
        "what is the sum of {a} and {b}",
        "(what do|how much do) {a} and {b} (make|add up to|give)",
        "{a} (+|plus) {b}",
    ),
    lambda random: {"a": _number(random), "b": _number(random)},
    _sum,
    "{a} + {b} = {result}",
)
TOOLS = (READY_PODS, SERVICE_STATUS, ADD)
