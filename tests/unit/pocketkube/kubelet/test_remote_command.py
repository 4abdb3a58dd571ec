"""exec and attach over WebSockets."""

import asyncio
import json
import os
import subprocess
from typing import Any

import psutil
import pytest

from pocketkube.containers import exec_process
from pocketkube.containers.container_log import ContainerLog
from pocketkube.containers.process import ContainerProcess, container_pids, spawn
from support.pocketkube.flood import flooding
from support.pocketkube.kubelet_client import SUCCESS, V4, V5, Kubelet, channels
from support.waiting import until


async def test_a_command_has_the_environment_and_folder_of_the_container(kubelet: Kubelet) -> None:
    socket = await kubelet.exec("sh", "-c", "echo $COLOUR; pwd; echo oops >&2; exit 3")
    received = await channels(socket)
    assert received[1].decode().splitlines() == ["green", str(kubelet.container.cwd)]
    assert received[2] == b"oops\n"
    status = json.loads(received[3])
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]


async def test_standard_input_ends_with_the_close_message_of_v5(kubelet: Kubelet) -> None:
    socket = await kubelet.exec("cat", streams="input output")
    sent = os.urandom(300_000)
    for start in range(0, len(sent), 50_000):
        await socket.send_bytes(b"\0" + sent[start : start + 50_000])
    await socket.send_bytes(b"\xff\0")
    received = await channels(socket)
    assert received[1] == sent
    assert json.loads(received[3]) == SUCCESS


async def test_v4_clients_may_send_text(kubelet: Kubelet) -> None:
    socket = await kubelet.exec("head", "-n1", protocol=V4, streams="input output")
    assert socket.protocol == V4
    await socket.send_str("\0hello\n")
    assert await channels(socket) == {1: b"hello\n", 3: json.dumps(SUCCESS).encode()}


async def test_input_after_the_end_of_standard_input_is_dropped(kubelet: Kubelet) -> None:
    script = "exec <&-; echo closed; while [ ! -e go ]; do sleep 0.02; done"
    socket = await kubelet.exec("sh", "-c", script, streams="input output")
    assert (await socket.receive(timeout=30)).data == b"\1closed\n"
    for _ in range(3):
        await socket.send_bytes(b"\0" + bytes(200_000))
    (kubelet.container.cwd / "go").touch()
    assert json.loads((await channels(socket))[3]) == SUCCESS


async def test_a_terminal_has_a_size_and_one_output(kubelet: Kubelet) -> None:
    script = "test -t 0 && test -t 2 && echo $TERM; read x; stty size; echo also >&2; exit 4"
    socket = await kubelet.exec("sh", "-c", script, streams="input output error tty")
    assert (await socket.receive(timeout=30)).data == b"\1xterm\r\n"
    await socket.send_bytes(b"\4not a size")
    await socket.send_bytes(b"\4" + json.dumps({"Width": 91, "Height": 17}).encode())
    await socket.send_bytes(b"\0\n")
    received = await channels(socket)
    assert received[1].split() == [b"17", b"91", b"also"]
    assert 2 not in received
    assert json.loads(received[3])["details"]["causes"][0]["message"] == "4"


async def test_control_c_reaches_the_command_in_a_terminal(kubelet: Kubelet) -> None:
    script = "trap 'exit 5' INT; echo ready; while :; do sleep 0.05; done"
    socket = await kubelet.exec("sh", "-c", script, streams="input output tty")
    assert (await socket.receive(timeout=30)).data == b"\1ready\r\n"
    await socket.send_bytes(b"\0\x03")
    received = await channels(socket)
    assert json.loads(received[3])["details"]["causes"][0]["message"] == "5"


async def test_a_command_that_cannot_start_is_an_internal_error(kubelet: Kubelet) -> None:
    status = json.loads((await channels(await kubelet.exec("no-such-command")))[3])
    assert status["reason"] == "InternalError"
    assert "'no-such-command' not found" in status["message"]
    query = [("command", "true"), ("output", "1")]
    socket = await kubelet.connect("/exec/ns/p/ended", V5, query)
    assert "not running" in json.loads((await channels(socket))[3])["message"]


async def test_a_daemon_of_the_command_does_not_delay_the_exit_status(kubelet: Kubelet) -> None:
    received = await channels(await kubelet.exec("sh", "-c", "sleep 600 & echo $!"))
    assert json.loads(received[3]) == SUCCESS
    daemon = psutil.Process(int(received[1]))
    await kubelet.container.finish()
    await until(lambda: not daemon.is_running(), "the daemon ends with the container")


@pytest.mark.parametrize("child", ["yes", "sh -c 'while echo y; do sleep 0.1; done'"])
async def test_a_child_that_continues_to_write_does_not_delay_the_exit_status(
    kubelet: Kubelet, child: str
) -> None:
    received = await channels(await kubelet.exec("sh", "-c", f"{child} & echo hi >&2; exit 3"))
    assert received[2] == b"hi\n"
    assert json.loads(received[3])["details"]["causes"][0]["message"] == "3"


async def test_a_client_that_reads_late_gets_the_output_and_the_exit_status(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = await kubelet.exec("sh", "-c", "echo $$ > pid; head -c 1000000 /dev/zero; exit 3")
    file = kubelet.container.cwd / "pid"
    pid = int(await until(lambda: file.exists() and file.read_text(), "the pid of the command"))
    await until(lambda: not psutil.pid_exists(pid), "the command has ended")
    loop, clock = asyncio.get_running_loop(), asyncio.get_running_loop().time
    for minutes in (1, 2):
        for _ in range(100):
            await asyncio.sleep(0)
        monkeypatch.setattr(loop, "time", lambda minutes=minutes: clock() + minutes * 60)
    received = await channels(socket)
    assert received[1] == bytes(1_000_000)
    assert json.loads(received[3])["details"]["causes"][0]["message"] == "3"


async def test_a_client_that_leaves_ends_its_command(kubelet: Kubelet) -> None:
    socket = await kubelet.exec("sh", "-c", "sleep 600 & echo $$ $!; wait")
    pids = [int(pid) for pid in (await socket.receive(timeout=30)).data[1:].split()]
    commands = [psutil.Process(pid) for pid in pids]
    assert container_pids()["process://some-id"] == kubelet.container.pid
    await socket.close()
    await until(lambda: not any(c.is_running() for c in commands), "the command has ended")
    assert kubelet.container.is_running


async def test_a_client_that_leaves_during_the_start_ends_its_command(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def spawn_and_leave(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        popen = spawn(*arguments, **options)
        commands.append(psutil.Process(popen.pid))
        asyncio.current_task().cancel()  # as aiohttp does when the client disconnects
        return popen

    monkeypatch.setattr(exec_process, "spawn", spawn_and_leave)
    await kubelet.exec("sleep", "600", streams="input output error")
    await until(lambda: commands and not commands[0].is_running(), "the command has ended")


async def test_a_client_that_leaves_while_the_command_reads_no_input_ends_it(
    kubelet: Kubelet,
) -> None:
    script = "sleep 600 & echo $$ $!; wait"
    socket = await kubelet.exec("sh", "-c", script, streams="input output")
    pids = [int(pid) for pid in (await socket.receive(timeout=30)).data[1:].split()]
    commands = [psutil.Process(pid) for pid in pids]
    async with flooding(socket):
        await kubelet.session.close()  # without a close message
        await until(lambda: not any(c.is_running() for c in commands), "the command has ended")


async def test_attach_follows_the_output_of_the_container(
    kubelet: Kubelet, container: tuple[ContainerProcess, ContainerLog]
) -> None:
    _, log = container
    log.feed("stdout", b"before\n")
    socket = await kubelet.connect("/attach/ns/p/main", V5, [("output", "1")])

    async def received() -> bytes:
        log.feed("stderr", b"again\n")  # until the server follows the log
        try:
            return (await socket.receive(timeout=0.05)).data
        except TimeoutError:
            return b""

    assert await until(received, "a line") == b"\1again\n"
    log.close()
    assert json.loads((await channels(socket))[3]) == SUCCESS
