"""A trained byte-level BPE tokenizer with a chat template, and a gateway over scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton_gateway.routing import engine_pool, file_discovery
from baton_text.chat_template import ChatTemplate
from baton_text.tokenizer import Tokenizer
from support.clients.client_rig import ClientRig, client_rig
from support.gateway.fake_engine import EOS_ID
from support.gateway.gateway_rig import GatewayRig, MakeRig, save_tokenizer

TEMPLATE = """\
{% for message in messages %}
{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
<|{{ message.role }}|>{{ message.content }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}"""

#: A template of conversations with calls and their results.
AGENT_TEMPLATE = """\
{% for message in messages %}
<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}
{% endfor %}"""


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    assert tokenizer.token_id(tokenizer.special_tokens["eos_token"]) == EOS_ID
    return tokenizer


@pytest.fixture
def agent_template(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(AGENT_TEMPLATE, tokenizer.special_tokens)
    monkeypatch.setattr(tokenizer, "chat_template", template)


@pytest.fixture
async def make_rig(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeRig]:
    monkeypatch.setattr(file_discovery, "FILE_POLL_S", 0.02)
    monkeypatch.setattr(engine_pool, "MAX_BACKOFF_S", 0.2)
    rigs: list[GatewayRig] = []

    def make(**config: Any) -> GatewayRig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(GatewayRig(folder, tokenizer, **config))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.close()


@pytest.fixture
async def rig(make_rig: MakeRig) -> GatewayRig:
    return make_rig()


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[ClientRig]:
    async with client_rig(tmp_path) as rig:
        yield rig
