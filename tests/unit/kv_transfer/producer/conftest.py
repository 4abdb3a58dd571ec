"""A producer and a scripted consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.kv_transfer.producer_rig import Consumer, Producer


@pytest.fixture
def consumer(make: Callable[..., Any], producer: Producer) -> Consumer:
    made: Consumer = make(Consumer, producer)
    return made
