"""Sends random messages to a ZMQ server from DEALER sockets, with or without the service's key.

For the fuzz tests of ZMQ ports.
"""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from typing import Any

import msgspec
import zmq

from baton_protocol.service_key import ServiceKey
from support.fuzz.fuzz_target import FuzzTarget
from support.fuzz.mutations import DEEP, mutate_bytes, mutate_value, random_value

#: Cases after which the client waits until the server has read them.
CASES_PER_CHECK = 128
#: Time in which the server must answer a valid message, on a busy machine.
ANSWER_TIMEOUT_S = 120.0
#: Time in which a closed connection sends its last messages.
LINGER_MS = 1000
_DEEP = b"\x91" * 3000 + b"\xc0"


class ZMQFuzzer(ABC):
    """Sends the cases of a target. A subclass makes the messages of its server.

    Args:
        address: ZMQ address of the server.
        key: the service's key; None: no key.
    """

    #: Cases that one connection sends.
    cases_per_connection = CASES_PER_CHECK

    def __init__(self, target: FuzzTarget, address: str, key: ServiceKey | None = None) -> None:
        self.target = target
        self._address = address
        self._key = key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        #: Answers to the cases.
        self.num_answers = 0

    @abstractmethod
    def make(self, rng: random.Random) -> list[bytes]:
        """Return the frames of one case."""

    @abstractmethod
    def check(self, peer: zmq.Socket[bytes]) -> None:
        """Send a valid message on a new connection, and check the answer.

        The server has then read the messages of all earlier cases.
        """

    def begin_connection(self, peer: zmq.Socket[bytes], rng: random.Random) -> None:  # noqa: B027
        """Send the messages with which a connection begins. By default, send none."""

    def run(self) -> None:
        peer: zmq.Socket[bytes] | None = None
        try:
            for number in self.target.numbers():
                if number % CASES_PER_CHECK == 0 and peer is not None:
                    self.settle()
                if number % self.cases_per_connection == 0 or peer is None:
                    if peer is not None:
                        peer.close(linger=LINGER_MS)
                    peer = self.connect()
                    self.begin_connection(peer, self.target.rng(-number - 1))
                peer.send_multipart(self.make(self.target.rng(number)))
                with contextlib.suppress(zmq.Again):
                    while peer.recv_multipart(zmq.NOBLOCK):
                        self.num_answers += 1
            self.settle()
        finally:
            if peer is not None:
                peer.close(linger=0)

    def settle(self) -> None:
        with self.connect() as peer:
            self.check(peer)

    def connect(self) -> zmq.Socket[bytes]:
        peer = self._context.socket(zmq.DEALER)
        peer.linger = 0
        peer.sndtimeo = peer.rcvtimeo = int(ANSWER_TIMEOUT_S * 1000)
        if self._key is not None:
            self._key.protect_client(peer)
        peer.connect(self._address)
        return peer


def mutate_message(message: Any, rng: random.Random) -> bytes:
    """Return a msgpack message, such as a struct, with random changes. One in ten is unchanged."""
    value = msgspec.to_builtins(message, builtin_types=(bytes,))
    kind = rng.random()
    if kind > 0.1:
        value = mutate_value(value, rng, rounds=rng.choice((1, 1, 1, 2, 4)))
    data = encode_msgpack(value)
    return mutate_bytes(data, rng) if kind > 0.8 else data


def encode_msgpack(value: Any) -> bytes:
    """Return `value` as msgpack. The string DEEP becomes deeply nested arrays."""
    return msgspec.msgpack.encode(value).replace(msgspec.msgpack.encode(DEEP), _DEEP)


def mutate_frames(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """Return a multipart message with another number or order of frames, or other content."""
    frames = list(frames)
    at = rng.randrange(len(frames))
    action = rng.randrange(5)
    if action == 0:
        del frames[at]
    elif action == 1:
        frame = rng.randbytes(rng.choice((0, 1, 100, 10_000)))
        frames[at:at] = [frame] * rng.choice((1, 1, 30, 2000 if len(frame) <= 1 else 1))
    elif action == 2:
        frames[at] = mutate_bytes(frames[at], rng)
    elif action == 3:
        frames[at] = encode_msgpack(random_value(rng))
    else:
        rng.shuffle(frames)
    return frames or [b""]
