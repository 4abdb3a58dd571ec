"""Log lines name their service, also with concurrent tasks."""

from __future__ import annotations

import asyncio
import json
import logging

from baton_operator.logs import TEXT, JsonFormatter, TextFormatter, operation, service
from baton_operator.names import Key

A, B = Key("ns", "a"), Key("ns", "b")
logger = logging.getLogger("test_logs")


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


async def _log_concurrently(handler: Lines) -> None:
    async def work(key: Key) -> None:
        service.set(key)
        operation.set(f"op-{key.name}")
        await asyncio.sleep(0)  # the other task sets its variables
        logger.warning("about %s", key.name)

    logger.addHandler(handler)
    try:
        await asyncio.gather(work(A), work(B))
        logger.warning("about nobody")
        try:
            raise OSError("no route")
        except OSError:
            logger.exception("failed")
    finally:
        logger.removeHandler(handler)


async def test_json_lines_have_the_service_and_the_operation() -> None:
    handler = Lines(JsonFormatter())
    await _log_concurrently(handler)
    *about, nobody, failed = map(json.loads, handler.lines)
    for line in about:
        name = line["message"].removeprefix("about ")
        assert (line["namespace"], line["service"], line["operation"]) == ("ns", name, f"op-{name}")
        assert (line["level"], line["logger"]) == ("warning", "test_logs")
        assert line["ts"].endswith("Z")
    assert set(nobody) == {"ts", "level", "logger", "message"}
    assert "OSError: no route" in failed["exception"]
    assert all("\n" not in line for line in handler.lines)


async def test_text_lines_have_the_service() -> None:
    handler = Lines(TextFormatter(TEXT))
    await _log_concurrently(handler)
    assert any("[ns/a] about a" in line for line in handler.lines)
    assert any(line.endswith(": about nobody") for line in handler.lines)
