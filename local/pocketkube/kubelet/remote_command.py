"""Connect a WebSocket with a command in a container, for `kubectl exec` and `kubectl attach`.

Every binary message begins with one byte, the number of its channel. The subprotocol
v5.channel.k8s.io adds the message (CLOSE, STDIN) to v4.channel.k8s.io: standard input has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from pocketkube.containers.exec_process import ExecProcess, ExecStreams
from pocketkube.containers.process import ContainerProcess, StartError
from pocketkube.websockets import messages, run_until_closed

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = b"\0", b"\1", b"\2", b"\3", b"\4", b"\xff"
_OUTPUTS = {"stdout": STDOUT, "stderr": STDERR}

Status = dict[str, Any]


def exit_status(code: int) -> Status:
    """Return the metav1.Status that reports the exit code `code` of a command."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def internal_error(message: str) -> Status:
    """Return the metav1.Status of a command that could not be started."""
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"Internal error occurred: {message}",
        "reason": "InternalError",
        "details": {"causes": [{"message": message}]},
        "code": 500,
    }


async def run_command(
    socket: web.WebSocketResponse,
    container: ContainerProcess | None,
    argv: list[str],
    streams: ExecStreams,
) -> None:
    """Run a command until it ends. If the client closes `socket` first, kill the command.

    Args:
        container: the main process of the container; None if the container does not run.
    """
    if container is None:
        await _finish(socket, internal_error("the container is not running"))
        return
    try:
        process = ExecProcess.start(container, argv, streams)
    except StartError as error:
        message = f"error executing command in container: {error}"
        await _finish(socket, internal_error(message))
        return
    try:
        if await run_until_closed(
            socket, _receive(socket, process), _send_outputs(socket, process)
        ):
            await _finish(socket, exit_status(await process.wait()))
    finally:
        await process.close()


async def attach(socket: web.WebSocketResponse, output: AsyncIterator[bytes]) -> None:
    """Send a container's output until the output ends or the client closes `socket`.

    Containers have no standard input, so input is dropped.
    """

    async def receive() -> None:
        async for _ in messages(socket):
            pass

    async def send() -> None:
        async for data in output:
            await socket.send_bytes(STDOUT + data)

    if await run_until_closed(socket, receive(), send()):
        await _finish(socket, exit_status(0))


async def _finish(socket: web.WebSocketResponse, status: Status) -> None:
    await socket.send_bytes(ERROR + json.dumps(status).encode())
    await socket.close()


async def _receive(socket: web.WebSocketResponse, process: ExecProcess) -> None:
    """Pass input and terminal sizes from the client to the command until `socket` is closed."""
    async for message in messages(socket):
        channel, data = message[:1], message[1:]
        if channel == STDIN:
            await process.write(data)
        elif (channel, data) == (CLOSE, STDIN):
            process.close_stdin()
        elif channel == RESIZE:
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, struct.error):
                size = json.loads(data)
                process.resize(size["Width"], size["Height"])


async def _send_outputs(socket: web.WebSocketResponse, process: ExecProcess) -> None:
    """Send the outputs of the command until it has ended."""

    async def send(output: str) -> None:
        async for data in process.read(output):
            await socket.send_bytes(_OUTPUTS[output] + data)

    async with asyncio.TaskGroup() as group:
        for output in process.outputs:
            group.create_task(send(output))
    await process.wait()
