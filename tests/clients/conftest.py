"""A gateway for the programs of clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton_text.tokenizer import Tokenizer
from support.clients.client_rig import TEMPLATE, ClientRig
from support.clients.programs import are_installed
from support.gateway.gateway_rig import GatewayRig
from support.gateway.small_tokenizer import save_tokenizer


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[ClientRig]:
    """The gateway of a model that reasons and calls tools as Qwen3 does."""
    if not are_installed():
        pytest.fail("the clients are not installed: run make clients")
    save_tokenizer(tmp_path, TEMPLATE)
    gateway = GatewayRig(
        tmp_path,
        Tokenizer.from_folder(tmp_path),
        tool_parser="hermes",
        reasoning_parser="think",
    )
    rig = ClientRig(gateway, tmp_path)
    await rig.start()
    yield rig
    await gateway.close()
