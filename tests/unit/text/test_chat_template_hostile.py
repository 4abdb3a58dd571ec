"""A hostile chat template ends with an error, within the limits, and harms no other template."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

import psutil
import pytest

from baton_text import chat_template
from baton_text.chat_template import (
    MAX_ERROR,
    ChatTemplate,
    ChatTemplateError,
    TemplateProcessError,
)
from support.hostile.templates import CPU, LOOPS, TEMPLATE_ATTACKS, TemplateAttack
from support.waiting import eventually, suspend

MESSAGES = [{"role": "user", "content": "hi"}]
SECOND_TIME = "{% if messages|length > 1 %}" + LOOPS + "{% endif %}sound"


@pytest.fixture
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.3)


def process_of(template: ChatTemplate) -> psutil.Process:
    [idle] = template._idle
    return psutil.Process(idle._process.pid)


@pytest.mark.parametrize(
    "attack", [pytest.param(attack, id=attack.name) for attack in TEMPLATE_ATTACKS]
)
def test_an_attack_ends_with_a_reason(
    attack: TemplateAttack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_MEMORY_BYTES", 2**28)
    if attack.message == CPU:  # on a slow machine, the memory takes that long to fill
        monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.3)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is checked below)
        ChatTemplate(attack.source, {}).render(MESSAGES)
    assert attack.message in str(caught.value)
    assert len(str(caught.value)) <= MAX_ERROR + len("chat template: ")


@pytest.mark.usefixtures("_little_time")
def test_a_template_renders_again_after_an_attack() -> None:
    template = ChatTemplate(SECOND_TIME, {})
    for _ in range(2):
        assert template.render(MESSAGES) == "sound"
        with pytest.raises(ChatTemplateError, match="CPU time"):
            template.render(MESSAGES * 2)


def test_a_process_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("sound", {})
    process = process_of(template)
    process.kill()
    eventually(lambda: process.status() == psutil.STATUS_ZOMBIE, "the process ends")
    assert template.render(MESSAGES) == "sound"


def test_a_process_without_cpus_is_ended_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("sound", {})
    process = process_of(template)
    suspend(process.pid)
    monkeypatch.setattr(chat_template, "MAX_WALL_S", 0.2)
    with pytest.raises(TemplateProcessError, match=r"it takes more than 0\.2 s"):
        template.render(MESSAGES)
    assert not process.is_running()


def test_a_process_that_is_killed_while_it_renders_is_no_fault_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel kills processes if a host or a pod has too little memory."""
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 60.0)
    template = ChatTemplate(SECOND_TIME, {})
    process = process_of(template)
    started = process.cpu_times().user
    with ThreadPoolExecutor(1) as threads:
        rendering = threads.submit(template.render, MESSAGES * 2)
        eventually(lambda: process.cpu_times().user > started + 0.1, "the template runs")
        process.kill()
        with pytest.raises(TemplateProcessError, match="ended with code -9"):
            rendering.result()
    assert template.render(MESSAGES) == "sound"


@pytest.mark.parametrize(
    ("limit", "num_bytes"),
    [(None, 2**30), (2**40, 2**30), (2**32, 2**29), (2**28, 2**27)],
)
def test_the_memory_of_the_process_is_bounded_by_the_limit_of_the_container(
    limit: int | None, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "memory_limit", lambda: limit)
    template = ChatTemplate("{% if messages|length > 1 %}{{ 'a' * 10 ** 11 }}{% endif %}sound", {})
    assert process_of(template).rlimit(psutil.RLIMIT_AS) == (num_bytes, num_bytes)
    assert template.render(MESSAGES) == "sound"
    with pytest.raises(ChatTemplateError, match=f"more than {num_bytes >> 20} MiB of memory"):
        template.render(MESSAGES * 2)


def test_a_template_that_is_no_longer_used_leaves_no_process() -> None:
    template = ChatTemplate("sound", {})
    process = process_of(template)
    assert process.is_running()
    del template
    gc.collect()
    assert not process.is_running()


def test_threads_render_in_processes_of_their_own() -> None:
    template = ChatTemplate(SECOND_TIME, {})
    with ThreadPoolExecutor(1) as threads:
        attack = threads.submit(template.render, MESSAGES * 2)
        eventually(lambda: not template._idle, "the attack has taken the process")
        assert template.render(MESSAGES) == "sound"
        assert not attack.done()
        with pytest.raises(ChatTemplateError, match="CPU time"):
            attack.result()


def test_the_process_has_no_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    template = ChatTemplate("sound", {})
    process = process_of(template)
    assert "HF_TOKEN" not in process.environ()
    assert len(os.listdir(f"/proc/{process.pid}/fd")) <= 4  # the socket, null and stderr
    assert template.render(MESSAGES) == "sound"


def test_the_process_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder may be the folder of a checkpoint."""
    for name in ("jinja2", "marshal", "resource"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate("sound", {}).render(MESSAGES) == "sound"


@pytest.mark.parametrize("value", [2**100, "\ud800", float("inf"), None, [{"a": [1.5, True]}]])
def test_json_values_reach_the_template_unchanged(value: object) -> None:
    template = ChatTemplate("{{ value }}", {})
    assert template.render([], value=value) == str(value)


class Role(StrEnum):
    USER = "user"


def test_subclasses_of_json_types_are_rendered_as_json_values() -> None:
    message = OrderedDict(role=Role.USER, content="hi")
    template = ChatTemplate("{{ messages }} {{ value }}", {})
    text = template.render([message], value=(Role.USER,))
    assert text == f"{[{'role': 'user', 'content': 'hi'}]} {['user']}"


def test_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="JSON values"):
        ChatTemplate("{{ value }}", {}).render([], value=object())
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="deep nesting"):
        ChatTemplate("{{ value }}", {}).render([], value=deep)


def test_a_large_conversation_may_have_a_large_prompt() -> None:
    """The limit of the text grows with the messages."""
    content = "a" * 2**21
    template = ChatTemplate("{{ messages[0].content * 7 }}", {})
    assert len(template.render([{"role": "user", "content": content}])) == 7 * 2**21
