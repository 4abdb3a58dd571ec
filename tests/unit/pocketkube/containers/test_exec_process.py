"""Further commands in a container."""

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pocketkube.containers import exec_process
from pocketkube.containers.container_log import ContainerLog
from pocketkube.containers.exec_process import ExecProcess, ExecStreams
from pocketkube.containers.process import ContainerProcess


async def turns_of_the_event_loop() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_the_output_of_a_command_precedes_that_of_a_child_without_end(
    container: tuple[ContainerProcess, ContainerLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_process, "_DRAIN_S", 0.0)
    argv = ["sh", "-c", "head -c 100000 /dev/zero; yes &"]
    process = ExecProcess.start(container[0], argv, ExecStreams(stdout=True))
    received = b""
    async with asyncio.timeout(30):
        async for data in process.read("stdout"):
            received += data
            if len(received) > 40_000:  # a pipe holds the rest
                await process.wait()
                await turns_of_the_event_loop()
    assert received.startswith(bytes(100_000))
    await process.close()


async def test_a_terminal_that_has_ended_is_read_to_its_end(
    container: tuple[ContainerProcess, ContainerLog],
) -> None:
    argv, streams = ["seq", "1000"], ExecStreams(stdout=True, tty=True)
    process = ExecProcess.start(container[0], argv, streams)
    assert await process.wait() == 0
    await turns_of_the_event_loop()  # enough to read ahead
    received = b"".join([data async for data in process.read("stdout")])
    assert received.split() == [b"%d" % number for number in range(1, 1001)]
    await process.close()


async def test_a_cancelled_close_kills_the_command_once_a_thread_is_free(
    container: tuple[ContainerProcess, ContainerLog],
) -> None:
    process = ExecProcess.start(container[0], ["sleep", "600"], ExecStreams())
    is_free, threads = threading.Event(), ThreadPoolExecutor(1)
    threads.submit(is_free.wait)
    asyncio.get_running_loop().set_default_executor(threads)
    closing = asyncio.create_task(process.close())
    await turns_of_the_event_loop()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    is_free.set()
    async with asyncio.timeout(30):
        assert await process.wait() == 128 + signal.SIGKILL
