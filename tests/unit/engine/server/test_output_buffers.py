"""Buffers are used again, and never while ZMQ still reads them."""

from __future__ import annotations

import time

import msgspec
import pytest
import zmq

from baton_engine.server.output_buffers import ZERO_COPY_BYTES, OutputBuffers

LARGE = list(range(ZERO_COPY_BYTES))


@pytest.fixture
def pair():
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


def test_every_message_arrives_as_it_was_whatever_is_encoded_after_it(pair):
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


def test_a_lent_buffer_comes_back_when_the_message_has_left(pair):
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


def test_one_message_goes_to_several_sockets(pair):
    push, pull = pair
    buffers = OutputBuffers()
    with buffers.encode(LARGE) as payload:
        payload.send(push)
        payload.send(push)
    assert receive(pull) == receive(pull) == LARGE
