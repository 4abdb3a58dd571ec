"""A hostile chat template or tokenizer: clients get a reason, and other requests go on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton_text import chat_template
from baton_text.tokenizer import Tokenizer
from support.gateway.gateway_rig import GatewayRig
from support.hostile.attack import fields
from support.hostile.templates import LOOPS
from support.waiting import suspend, until

TEMPLATE = (
    "{% set text = messages[0].content %}"
    "{% if text == 'loop' %}" + LOOPS + "{% elif text == 'grow' %}{{ 'a' * 10 ** 11 }}"
    "{% elif text == 'write' %}{% for i in range(99999) %}" + "a" * 100 + "{% endfor %}"
    "{% endif %}{{ text }}"
)
#: A regular expression that needs too many steps for a long run of x, and few for other texts.
SLOW = "(x+)+$"


@pytest.fixture
async def rig(tokenizer_folder: Path, tmp_path: Path) -> AsyncIterator[GatewayRig]:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    split = {"type": "Split", "pattern": {"Regex": SLOW}, "behavior": "Isolated", "invert": False}
    fields(pre_tokenizer=split)(folder / "tokenizer.json")
    rig = GatewayRig(tmp_path, Tokenizer.from_folder(folder))
    await rig.start(rig.engine("d", "decode"))
    yield rig
    await rig.close()


def chat(text: str) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("loop", "takes more than 2 s of CPU time"),
        ("grow", "MiB of memory"),
        ("write", "has more than 4194304 bytes"),
    ],
)
async def test_an_attack_is_answered_with_400_and_the_reason(
    rig: GatewayRig, path: str, text: str, reason: str
) -> None:
    status, answer, _ = await rig.post(path, chat(text))
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["message"].startswith("The chat template refuses these messages: ")
    assert reason in answer["error"]["message"]
    assert (await rig.post(path, chat("hello")))[0] == 200


async def test_other_requests_are_answered_during_an_attack(rig: GatewayRig) -> None:
    template = rig.tokenizer.chat_template
    assert template is not None
    attack = asyncio.create_task(rig.post("/v1/chat/completions", chat("loop")))
    await until(lambda: not template._idle, "the attack has taken the process")
    for path, body in (
        ("/v1/completions", {"model": "m", "prompt": "hello"}),
        ("/tokenize", {"model": "m", "prompt": "hello"}),
        ("/v1/chat/completions", chat("hello")),
    ):
        assert (await rig.post(path, body))[0] == 200
        assert not attack.done()
    assert (await attack)[0] == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_text_for_which_the_tokenizer_panics_is_refused(rig: GatewayRig, path: str) -> None:
    status, answer, _ = await rig.post(path, {"model": "m", "prompt": "x" * 40 + "!"})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "The model's tokenizer cannot process prompt" in answer["error"]["message"]
    assert (await rig.post(path, {"model": "m", "prompt": "hello"}))[0] == 200


async def test_a_gateway_has_two_processes_for_its_template_at_most(rig: GatewayRig) -> None:
    answers = await asyncio.gather(
        *(rig.post("/tokenize", chat(text)) for text in ["loop", "hello"] * 3)
    )
    assert [status for status, _, _ in answers] == [400, 200] * 3
    assert rig.tokenizer.chat_template is not None
    assert len(rig.tokenizer.chat_template._idle) <= 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_template_that_gets_no_cpu_is_a_server_error(
    rig: GatewayRig, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = rig.tokenizer.chat_template
    assert template is not None
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "MAX_WALL_S", 0.2)
        suspend(template._idle[0]._process.pid)
        status, answer, headers = await rig.post(path, chat("hello"))
    assert (status, answer["error"]["code"]) == (503, "service_unavailable")
    assert "takes more than 0.2 s" in answer["error"]["message"]
    assert int(headers["Retry-After"]) > 0
    assert (await rig.post(path, chat("hello")))[0] == 200
