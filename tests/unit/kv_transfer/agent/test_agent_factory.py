"""The agent of each transport."""

from __future__ import annotations

import pytest

from baton_kv_transfer.agent.agent import Agent
from baton_kv_transfer.agent.agent_factory import create_agent
from support.kv_transfer.agent_processes import (
    Side,
)


def test_an_unknown_transport_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="no transport 'pigeon'; there are auto, nixl, inproc, "):
        create_agent("me", "pigeon")


def test_every_transport_provides_an_agent(side: Side) -> None:
    assert isinstance(side.agent, Agent)
    assert side.agent.num_refused == 0
