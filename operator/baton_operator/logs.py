"""Log lines that say which service, and which operation of a topology, they are about."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from baton_operator.workqueue import Key, Work

LogFormat = Literal["json", "text"]

service: ContextVar[Key | None] = ContextVar("service", default=None)
"""The service that is being reconciled."""
operation: ContextVar[str] = ContextVar("operation", default="")
"""Id of the change of topology that is under way in it."""


def about_its_service(work: Work) -> Work:
    """`work`, whose log lines name its key."""

    async def named(key: Key) -> float | None:
        with _set(key):
            return await work(key)

    return named


@contextmanager
def _set(key: Key) -> Iterator[None]:
    service_token, operation_token = service.set(key), operation.set("")
    try:
        yield
    finally:
        service.reset(service_token)
        operation.reset(operation_token)


def configure(log_format: LogFormat, level: str) -> None:
    """Of the whole process, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ts, level, logger, message; namespace, service, operation and exception where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if key := service.get():
            line |= {"namespace": key.namespace, "service": key.name}
        if operation.get():
            line["operation"] = operation.get()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """For people: the service in brackets before the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        key = service.get()
        record.about = f"[{key}] " if key else ""
        return super().format(record)
