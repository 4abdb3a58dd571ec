"""Logs of containers: rotation, tail, follow."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pocketkube.containers.container_log import ContainerLog, stream_log


async def read(path: Path, log: ContainerLog | None, **options: object) -> bytes:
    return b"".join([chunk async for chunk in stream_log(path, log, **options)])


async def test_a_log_returns_what_was_written_and_stays_within_its_size(tmp_path: Path) -> None:
    log = ContainerLog(tmp_path / "0.log", max_bytes=2000)
    text = b"".join(b"line %03d\n" % n for n in range(100))
    for start in range(0, len(text), 7):  # chunks that split lines
        log.feed("stdout", text[start : start + 7])
    log.feed("stdout", b"no newline")
    log.close()
    kept = await read(log.path, log)
    assert (text + b"no newline").endswith(kept)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4200
    assert await read(log.path, log, tail=2) == b"line 099\nno newline"
    assert await read(log.path, log, limit_bytes=5) == kept[:5]
    assert await read(log.path, log, since=datetime.now(UTC) + timedelta(hours=1)) == b""
    assert log.tail(max_bytes=10) == "no newline"


async def test_a_follower_sees_lines_across_a_rotation(tmp_path: Path) -> None:
    log = ContainerLog(tmp_path / "0.log", max_bytes=1000)
    log.feed("stdout", b"first\n")
    follower = asyncio.create_task(read(log.path, log, follow=True))
    expected = b"first\n"
    for n in range(60):
        line = b"line %d\n" % n
        log.feed("stdout", line)
        expected += line
        await asyncio.sleep(0.002)  # the follower reads a part in between
    log.close()
    assert await asyncio.wait_for(follower, 60) == expected


async def test_following_a_log_ends_when_its_pod_is_removed(tmp_path: Path) -> None:
    log = ContainerLog(tmp_path / "0.log")
    log.feed("stdout", b"first\n")
    follower = asyncio.create_task(read(log.path, log, follow=True))
    await asyncio.sleep(0)  # starts the follower
    log.path.unlink()
    log.close()
    assert await asyncio.wait_for(follower, 60) == b"first\n"
