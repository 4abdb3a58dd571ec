"""Requests that the scheduler refuses."""

from __future__ import annotations

import pytest

from baton_engine.scheduling.request_limits import RequestRefusedError
from baton_protocol.engine_messages import ErrorCode
from support.engine.scheduling.scheduler_engine import Engine


def test_refusals_have_an_error_code_and_name_the_limit() -> None:
    engine = Engine(num_blocks=4, max_queue=1)
    with pytest.raises(RequestRefusedError, match=r"16 prompt .* 16 tokens") as refused:
        engine.add("long", [1] * 16)
    assert refused.value.code is ErrorCode.LENGTH
    engine.add("queued", [1])
    with pytest.raises(RequestRefusedError, match="1 requests are waiting") as refused:
        engine.add("more", [1])
    assert refused.value.code is ErrorCode.OVERLOADED
    engine.scheduler.draining = True
    with pytest.raises(RequestRefusedError, match="draining") as refused:
        engine.add("late", [1])
    assert refused.value.code is ErrorCode.DRAINING
