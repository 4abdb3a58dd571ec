"""The deadline of a request."""

from __future__ import annotations

import asyncio

import pytest

from baton_gateway.endpoints.request_deadline import RequestDeadline
from baton_gateway.errors import APIError


async def test_work_beyond_the_deadline_is_an_error() -> None:
    deadline = RequestDeadline(0.02)
    with pytest.raises(APIError) as timed_out:
        async with deadline.enforced():
            await asyncio.Event().wait()
    assert timed_out.value.status == 504
    assert deadline.left_s <= 0


async def test_paused_time_does_not_count_even_after_an_error() -> None:
    deadline = RequestDeadline(5.0)

    async def fail() -> None:
        async with deadline.paused():
            await asyncio.sleep(0.05)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert deadline.left_s > 4.96


async def test_without_a_limit_there_is_no_deadline() -> None:
    deadline = RequestDeadline(0)
    async with deadline.enforced():
        await asyncio.sleep(0)
    assert deadline.left_s == float("inf")
