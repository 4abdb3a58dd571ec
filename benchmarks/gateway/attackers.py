"""Hostile clients of a gateway, which hold connections in four ways.

    python benchmarks/gateway/attackers.py PORT NUM

There are four kinds of clients, NUM / 4 of each: a client sends nothing, sends a head byte by byte,
sends a body of 16 MiB without its end, or does not read a stream. A client whose connection is
closed connects again.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

BODY_BYTES = 16 * 2**20
#: A body client sends one chunk per interval, until one byte is missing.
CHUNK_BYTES = 2**16
INTERVAL_S = 0.25
#: Pause before a client connects again.
PAUSE_S = 1.0
#: Duration in which all clients start.
RAMP_S = 5.0
STREAM = {"model": "m", "prompt": "go", "max_tokens": 500, "stream": True, "logprobs": 5}

Attack = Callable[[socket.socket], Awaitable[None]]


async def send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


def head(size: int) -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()


async def until_closed(connection: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(connection, 2**16):
        pass


async def idle(connection: socket.socket) -> None:
    await until_closed(connection)


async def slow_head(connection: socket.socket) -> None:
    await send(connection, b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
    while True:
        await send(connection, b"a")
        await asyncio.sleep(INTERVAL_S)


async def slow_body(connection: socket.socket) -> None:
    await send(connection, head(BODY_BYTES))
    closed = asyncio.ensure_future(until_closed(connection))
    try:
        left = BODY_BYTES - 1
        while left and not closed.done():
            await send(connection, b" " * min(CHUNK_BYTES, left))
            left -= min(CHUNK_BYTES, left)
            await asyncio.sleep(INTERVAL_S)
        await closed
    finally:
        closed.cancel()


async def unread_stream(connection: socket.socket) -> None:
    body = json.dumps(STREAM).encode()
    await send(connection, head(len(body)) + body)
    await asyncio.Event().wait()


ATTACKS: tuple[Attack, ...] = (idle, slow_head, slow_body, unread_stream)


async def run(port: int, attack: Attack, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    while True:
        with socket.socket() as connection, suppress(OSError):
            connection.setblocking(False)
            if attack is unread_stream:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
            await attack(connection)
        await asyncio.sleep(PAUSE_S)


async def main() -> None:
    port, num = int(sys.argv[1]), int(sys.argv[2])
    await asyncio.gather(
        *(run(port, ATTACKS[n % len(ATTACKS)], RAMP_S * n / num) for n in range(num))
    )


if __name__ == "__main__":
    asyncio.run(main())
