"""Output buffers are reused, but not while ZMQ reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from baton_engine.server.output_buffers import ZERO_COPY_BYTES, OutputBuffers

LARGE = list(range(ZERO_COPY_BYTES))


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context.instance()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        push.setsockopt(option, 0)
        pull.setsockopt(option, 0)
    pull.connect(f"tcp://127.0.0.1:{push.bind_to_random_port('tcp://127.0.0.1')}")
    assert push.poll(10_000, zmq.POLLOUT), "no connection"
    yield push, pull
    push.close()
    pull.close()


def receive(pull: zmq.Socket[bytes]) -> object:
    assert pull.poll(60_000), "no message"
    return msgspec.msgpack.decode(pull.recv())


def test_later_messages_do_not_overwrite_a_message_that_is_being_sent(pair) -> None:
    push, pull = pair
    buffers = OutputBuffers()
    messages = [
        [*LARGE[: size * 5000], number] for number, size in enumerate([0, 9, 1, 9, 0, 8] * 20)
    ]
    for message in messages:
        with buffers.encode(message) as payload:
            payload.send(push)
    for message in messages:
        assert receive(pull) == message


def test_a_buffer_is_free_again_after_its_message_was_sent(pair) -> None:
    push, pull = pair
    buffers = OutputBuffers()
    deadline = time.monotonic() + 60
    with buffers.encode(LARGE) as payload:
        payload.send(push)
    assert len(buffers._lent) == 1
    assert receive(pull) == LARGE
    while buffers._lent:
        assert time.monotonic() < deadline, "the buffer did not come back"
        with buffers.encode("small") as payload:
            payload.send(push)
        receive(pull)


def test_one_message_can_be_sent_several_times(pair) -> None:
    push, pull = pair
    buffers = OutputBuffers()
    with buffers.encode(LARGE) as payload:
        payload.send(push)
        payload.send(push)
    assert receive(pull) == receive(pull) == LARGE


def test_a_client_that_does_not_read_keeps_its_own_buffers_only(pair) -> None:
    push, pull = pair
    buffers = OutputBuffers()
    with zmq.Context.instance().socket(zmq.PUSH) as unread:
        unread.linger = 0
        unread.connect("tcp://127.0.0.1:1")
        with buffers.encode(LARGE) as payload:
            payload.send(unread)
        for _ in range(200):
            with buffers.encode(LARGE) as payload:
                payload.send(push)
            receive(pull)
        assert 1 <= len(buffers._lent) < 100
