"""Expands the questions of facts.toml, and splits them into training and held-out ones."""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random

FACTS = Path(__file__).with_name("facts.toml")
#: Of the questions about a fact, this share is held out, and at least two.
HELD_OUT_SHARE = 0.1

#: Frames by their name in facts.toml. `X` is the text that follows the name.
_FRAMES = {
    "what": (
        "what (is|are) X",
        "what's X",
        "what does X mean",
        "what do you mean by X",
        "(explain|define|describe) X",
        "(tell|teach) me (about|something about) X",
        "tell me what X (is|means)",
        "what do I need to know about X",
        "X",
    ),
    "do": (
        "what (does|do) X do",
        "what (is|are) X (for|used for|good for)",
        "what is the (job|role|purpose|task|use) of X",
        "why (does Baton have|do I need|is there) X",
        "explain what X does",
    ),
    "how": (
        "how (do|can|should|would) (I|we) X",
        "how (to|does one|do you) X",
        "(show|tell) me how to X",
        "what (must|should|do) I do to X",
        "I (want|would like|need|have) to X",
        "is there a way to X",
        "what is the (best|easiest) way to X",
    ),
    "port": (
        "(which|what) port (does X use|is used by X|has X|belongs to X)",
        "(what is|tell me) the port (of|number of|for) X",
        "on (which|what) port (is|does) X (listen|run|serve)",
        "(which|what) port is X on",
        "port of X",
        "where does X listen",
    ),
    "default": (
        "what is the default (of|value of|for) X",
        "(which|what) default does X have",
        "default (value|) of X",
        "what is X by default",
        "what does X default to",
        "(which|what) value does X have by default",
    ),
}
_OPENINGS = (
    *("", "", "", "", ""),
    *("Please tell me: ", "Hello, ", "Hi! ", "I have a question: ", "Question: "),
    *("Quick question: ", "Can you tell me: ", "Please: ", "Hey, ", "So, ", "Sorry, "),
)
_ENDS = ("?", "?", "?", "", "", ".", " please?", ", please", "!")
_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")


@dataclass(frozen=True)
class Fact:
    """One answer, and the questions that it answers.

    Args:
        name: name of the table in facts.toml.
        source: path of a document from the root of the repository.
        text: text of this document that supports the answer.
        trained: questions of the training set, without a frame.
        held_out: questions that no training conversation contains.
    """

    name: str
    answer: str
    source: str
    text: str
    trained: tuple[str, ...]
    held_out: tuple[str, ...]


def load_facts(path: Path = FACTS) -> list[Fact]:
    """Return all facts.

    Raises:
        ValueError: two facts have the same question.
    """
    facts = []
    owner: dict[str, str] = {}
    for name, table in tomllib.loads(path.read_text()).items():
        questions = list(dict.fromkeys(map(normalize, _expand_lines(table["ask"]))))
        for question in questions:
            if owner.setdefault(question, name) != name:
                raise ValueError(f"{name} and {owner[question]} have the same question: {question}")
        trained, held_out = split(questions)
        texts = [table[key] for key in ("answer", "source", "text")]
        facts.append(Fact(name, *texts, tuple(trained), tuple(held_out)))
    return facts


def split(questions: list[str]) -> tuple[list[str], list[str]]:
    """Return the training questions and the held-out ones. The hash of a question decides."""
    ordered = sorted(questions, key=lambda text: hashlib.sha256(text.encode()).digest())
    count = max(2, round(HELD_OUT_SHARE * len(questions)))
    return ordered[count:], ordered[:count]


def normalize(question: str) -> str:
    """Return a question without the spaces that empty choices leave."""
    return re.sub(r" +([,?!.:]|$)", r"\1", " ".join(question.split()))


def expand(pattern: str) -> list[str]:
    """Return all texts of a pattern such as `(which|what) port`."""
    parts = _CHOICE.split(pattern)
    choices = [part.split("|") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(texts) for texts in itertools.product(*choices)]


def phrase(question: str, random: Random) -> str:
    """Return a question as a person may type it: with an opening, an end, and upper case."""
    opening, end = random.choice(_OPENINGS), random.choice(_ENDS)
    text = opening + question
    if random.random() < 0.6:
        text = text[0].upper() + text[1:]
    elif random.random() < 0.3:
        text = text.lower()
    return text + end


def _expand_lines(ask: str) -> list[str]:
    questions = []
    for line in filter(None, map(str.strip, ask.splitlines())):
        patterns = [line]
        if line.startswith("@"):
            frame, _, subject = line[1:].partition(" ")
            patterns = [
                text.replace("X", each) for text in _FRAMES[frame] for each in expand(subject)
            ]
        questions += [question for pattern in patterns for question in expand(pattern)]
    return questions
