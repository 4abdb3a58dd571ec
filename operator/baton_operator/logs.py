"""Log lines that say which service, and which operation of a topology, they are about."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

from baton_operator.names import Key

service: ContextVar[Key | None] = ContextVar("service", default=None)  # that is being reconciled
operation: ContextVar[str] = ContextVar(
    "operation", default=""
)  # id of the change of topology under way in it
TEXT = "%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s"


def configure(log_format: str, level: str) -> None:
    """Log the whole process to stderr. `log_format`: json or text."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("kopf").setLevel(logging.WARNING)  # it logs every event
        logging.getLogger("kopf._core.reactor").setLevel(
            logging.ERROR
        )  # threads and APIs that are absent by design


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ts, level, logger, message; namespace, service, operation and exception where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
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

    def format(self, record: logging.LogRecord) -> str:
        key = service.get()
        record.about = f"[{key}] " if key else ""
        return super().format(record)
