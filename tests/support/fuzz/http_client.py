"""Sends HTTP cases to a server over new connections, and reads the responses.

For the fuzz tests of HTTP ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections import Counter

from support.fuzz.fuzz_target import FuzzTarget
from support.fuzz.http_cases import HTTPCase, HTTPCases

#: Connections at once.
WIDTH = 16
#: Time in which the server must answer a complete request, on a busy machine.
ANSWER_TIMEOUT_S = 120.0
#: Time for which the client waits for an answer that the server need not send.
OPTIONAL_S = 0.05
_STATUS = re.compile(rb"HTTP/\d\.\d (\d{3}) ")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_RESET = struct.pack("ii", 1, 0)


class HTTPFuzzer:
    """Sends the cases of a target.

    Args:
        cases: makes the cases.
        allowed: statuses of 500 and above that responses may have.
    """

    def __init__(
        self, target: FuzzTarget, port: int, cases: HTTPCases, *, allowed: set[int]
    ) -> None:
        self._target = target
        self._port = port
        self._cases = cases
        self._allowed = allowed
        #: Responses by status. 0: a connection without a response.
        self.statuses: Counter[int] = Counter()

    async def run(self) -> None:
        numbers = self._target.numbers()

        async def work() -> None:
            for number in numbers:
                case = self._cases.make(self._target.rng(number))
                try:
                    await self._send(case)
                except AssertionError as error:
                    head = b"".join(case.parts)[:3000]
                    raise AssertionError(f"case {number}: {error}\n{head!r}") from None

        async with asyncio.TaskGroup() as group:
            for _ in range(WIDTH):
                group.create_task(work())
        print(f"{self._target.name}: statuses {dict(sorted(self.statuses.items()))}", flush=True)

    async def _send(self, case: HTTPCase) -> None:
        reader, writer = await asyncio.open_connection(
            self._target.pod.address, self._port, limit=2**26
        )
        try:
            received = await self._exchange(case, reader, writer)
        finally:
            if case.resets and not writer.is_closing():
                end: socket.socket = writer.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if not received:
            self.statuses[0] += 1
        for status in received:
            self.statuses[status] += 1
            assert status < 500 or status in self._allowed, f"status {status}"
        if case.num_responses:
            assert len(received) >= 1, "the connection was closed without a response"

    async def _exchange(
        self, case: HTTPCase, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> list[int]:
        received: list[int] = []
        with contextlib.suppress(ConnectionError):
            for part in case.parts:
                writer.write(part)
                await asyncio.sleep(0)
            if case.resets:
                return received
            timeout_s = ANSWER_TIMEOUT_S if case.num_responses else OPTIONAL_S
            try:
                async with asyncio.timeout(timeout_s):
                    while len(received) < max(1, case.num_responses):
                        status = await _read_response(reader)
                        if status is None:
                            break
                        received.append(status)
            except TimeoutError:
                assert not case.num_responses, (
                    f"{len(received)} of {case.num_responses} responses within {timeout_s:g} s"
                )
        return received


async def _read_response(reader: asyncio.StreamReader) -> int | None:
    """Read one response. Return its status, or None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    found = _STATUS.match(head)
    assert found, f"not HTTP: {head[:200]!r}"
    status = int(found[1])
    try:
        if status in (100, 204, 304):
            return status
        if length := _LENGTH.search(head):
            await reader.readexactly(int(length[1]))
        elif b"chunked" in head.lower():
            while size := int(await reader.readline() or b"0", 16):
                await reader.readexactly(size + 2)
            await reader.readline()
    except (asyncio.IncompleteReadError, ValueError):
        pass  # the end of the connection, or the response to a HEAD request
    return status
