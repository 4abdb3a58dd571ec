"""A hostile chat template of the served model: clients get a reason, and other requests go on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton_text.tokenizer import Tokenizer
from support.gateway.gateway_rig import GatewayRig
from support.hostile.templates import LOOPS
from support.waiting import until

TEMPLATE = (
    "{% set text = messages[0].content %}"
    "{% if text == 'loop' %}" + LOOPS + "{% elif text == 'grow' %}{{ 'a' * 10 ** 11 }}"
    "{% elif text == 'write' %}{% for i in range(99999) %}" + "a" * 100 + "{% endfor %}"
    "{% endif %}{{ text }}"
)


@pytest.fixture
async def rig(tokenizer_folder: Path, tmp_path: Path) -> AsyncIterator[GatewayRig]:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
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
        ("grow", "needs more than 1024 MiB of memory"),
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
