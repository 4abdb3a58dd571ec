"""Sends random bytes to a stream socket over new connections.

For the fuzz tests of ports without HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable

from support.fuzz.fuzz_target import FuzzTarget
from support.fuzz.mutations import mutate_bytes

#: Connections at once.
WIDTH = 16
#: Time for which the client waits for an answer.
QUIET_S = 0.01
#: Timeout of a connection, on a busy machine.
TIMEOUT_S = 120.0
_RESET = struct.pack("ii", 1, 0)

#: A ZMTP 3.1 greeting with the mechanism NULL or CURVE, READY and CURVE's HELLO.
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_CURVE_HELLO = b"\x05HELLO\x01\x00" + bytes(72)


def connect_tcp(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), TIMEOUT_S)


def connect_unix(name: bytes) -> socket.socket:
    """Connect to an abstract unix socket, whose name begins with a zero byte."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(TIMEOUT_S)
    end.connect(name)
    return end


def send_raw(
    target: FuzzTarget, connect: Callable[[], socket.socket], make: Callable[[random.Random], bytes]
) -> int:
    """Send the cases of a target, each over a new connection. Return the number of answered cases.

    A case is sent at once, or in two parts. Then the client waits for an answer for QUIET_S, or not
    at all, and closes or resets the connection.

    Args:
        connect: opens a connection, possibly with a handshake.
        make: makes the bytes of one case.
    """
    answered = 0

    async def send(number: int) -> None:
        nonlocal answered
        rng = target.rng(number)
        data = make(rng)
        at = rng.randrange(len(data) + 1) if rng.random() < 0.2 else len(data)
        waits = rng.random() < 0.9
        reader, writer = await asyncio.open_connection(sock=connect())
        with contextlib.suppress(ConnectionError):
            for part in filter(None, (data[:at], data[at:])):
                writer.write(part)
                await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S if waits else 0.0):
                    answered += bool(await reader.read(2**16))
                    while await reader.read(2**16):
                        pass
        end: socket.socket = writer.get_extra_info("socket")
        if rng.random() < 0.3 and not writer.is_closing():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def run() -> None:
        numbers = target.numbers()

        async def work() -> None:
            for number in numbers:
                await send(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(WIDTH):
                group.create_task(work())

    asyncio.run(run())
    return answered


def zmtp(rng: random.Random) -> bytes:
    """Return bytes for a ZeroMQ port: a handshake, whole, damaged or cut off, or random bytes."""
    mechanism = rng.choice((b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"X" * 20))
    greeting = _SIGNATURE + mechanism.ljust(20, b"\0") + rng.choice((b"\0", b"\1")) + bytes(31)
    handshake = _command(_CURVE_HELLO if mechanism == b"CURVE" else _READY)
    message = _frame(0, rng.randbytes(rng.choice((0, 1, 30, 3000))), rng)
    data = greeting + handshake + message * rng.choice((1, 2, 10))
    kind = rng.random()
    if kind < 0.2:
        return data
    if kind < 0.8:
        return mutate_bytes(data, rng)
    if kind < 0.9:
        return data[: rng.randrange(len(data))]
    return rng.randbytes(rng.choice((1, 10, 64, 5000)))


def _command(body: bytes) -> bytes:
    return b"\x04" + bytes([len(body)]) + body


def _frame(flags: int, body: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:  # a length that does not fit the bytes
        return bytes([flags | 2]) + rng.choice((2**63 - 1, 2**40, len(body) + 1)).to_bytes(8) + body
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8) + body
