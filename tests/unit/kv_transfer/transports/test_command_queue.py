"""Commands of any thread that one thread runs."""

from __future__ import annotations

import threading

import pytest

from baton_kv_transfer.transports import command_queue
from baton_kv_transfer.transports.command_queue import CommandQueue
from baton_kv_transfer.transports.transfer import TransportError


def test_commands_run_in_order_and_each_wakes_the_owner() -> None:
    ran: list[int] = []
    woken: list[None] = []
    commands = CommandQueue(lambda: woken.append(None))
    for number in range(3):
        commands.submit(lambda number=number: ran.append(number))
    assert (ran, len(woken)) == ([], 3)
    commands.run()
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_call_returns_the_result_or_raises_the_exception(is_failing: bool) -> None:
    submitted = threading.Event()
    commands = CommandQueue(submitted.set)

    def own() -> None:
        submitted.wait(10)
        commands.run()

    owner = threading.Thread(target=own)
    owner.start()
    if is_failing:
        with pytest.raises(ZeroDivisionError):
            commands.call(lambda: 1 // 0)
    else:
        assert commands.call(threading.get_ident) == owner.ident
    owner.join()


def test_a_call_that_the_owner_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_queue, "CALL_TIMEOUT_S", 0.01)
    with pytest.raises(TransportError, match=r"does not answer within 0\.01 s"):
        CommandQueue(lambda: None).call(int)


def test_a_closed_queue_refuses_commands_and_runs_the_queued_ones() -> None:
    ran: list[str] = []
    commands = CommandQueue(lambda: None)
    commands.submit(lambda: ran.append("queued"))
    assert commands.close()
    assert not commands.close()
    with pytest.raises(TransportError, match="the transport is closed"):
        commands.submit(lambda: ran.append("late"))
    commands.finish()
    assert ran == ["queued"]
